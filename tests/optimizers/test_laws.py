"""The laws of every optimizer in every framework; the rows are those of ``table.py``."""

from __future__ import annotations

import dataclasses
import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.optim.lr_scheduler import ChainedScheduler, MultiStepLR

import hvd_compress.tensorflow.keras as hvd_keras
import hvd_compress.torch as hvd_torch
from hvd_compress import optimizers
from hvd_compress.errors import ConfigError
from tests.optimizers.table import BAD, FRAMEWORKS, KERAS_NAMES, ROWS, InKeras, InNumPy, formula_of

SHAPES = [(5, 4), (4,), (3, 2, 2), (1,), (0, 3)]
EAGER = {"torch": FRAMEWORKS["torch"], "keras": FRAMEWORKS["keras"]}
rows = pytest.mark.parametrize("row", ROWS)
frameworks = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
eager = pytest.mark.parametrize("framework", EAGER.values(), ids=EAGER)


def arrays(seed, dtype="float64"):
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape).astype(dtype) for shape in SHAPES]


def test_every_optimizer_has_a_row():
    found = {
        name
        for name in optimizers.__all__
        if inspect.isclass(cls := getattr(optimizers, name)) and issubclass(cls, optimizers.Formula)
    }
    in_rows = {row.partition(":")[0] for row in ROWS}
    assert found - {"Formula"} == in_rows == BAD.keys()


@frameworks
@rows
def test_hosts_take_the_steps_of_the_formula(row, framework):
    """Before a freeze, and long after it."""
    ours, reference = framework(row, arrays(0)), InNumPy(row, arrays(0))
    for number in range(1, 10):
        for run in (ours, reference):
            run.step(arrays(number))
        for w, expected in zip(ours.weights(), reference.weights(), strict=True):
            np.testing.assert_allclose(w, expected, rtol=1e-11, atol=1e-13)


@rows
def test_the_formula_leaves_what_it_is_given(row):
    """In NumPy, which has the reference."""
    run = InNumPy(row, arrays(0))
    for number in range(6):
        given, before = run.weights()[:], [w.copy() for w in run.weights()]
        gradients = arrays(number)
        states = [{k: np.copy(x) for k, x in s.items()} for s in run.states]
        old = list(run.states)
        run.step(gradients)
        np.testing.assert_equal(given + gradients, before + arrays(number))
        np.testing.assert_equal(old, states)


@frameworks
@rows
def test_a_run_goes_on_from_what_was_saved(row, framework):
    """With the same bits, before a freeze and after it."""
    run = framework(row, arrays(0, "float32"))
    for number in range(2):
        run.step(arrays(number))
    for saved_after in (2, 6):
        again = run.saved_and_loaded(row)
        for number in range(saved_after, saved_after + 4):
            for each in (run, again):
                each.step(arrays(number))
        np.testing.assert_equal(run.weights(), again.weights())


@eager
@rows
def test_what_is_zero_stays_finite(row, framework):
    """Weights that are zero, and a gradient that comes for the first time after a freeze."""
    run = framework(row, [np.zeros(shape) for shape in SHAPES])
    for number in range(8):
        late = float(number > 5)
        run.step([np.full(shape, late if i == 2 else 1.0) for i, shape in enumerate(SHAPES)])
        assert all(np.isfinite(w).all() for w in run.weights())
    assert all((w < 0).all() for i, w in enumerate(run.weights()) if i != 2)
    if "freeze_step" in ROWS[row]:
        np.testing.assert_array_equal(run.weights()[2], 0)  # nothing is known of its scale


@eager
@rows
def test_nan_reaches_the_weights(row, framework):
    run = framework(row, arrays(0))
    run.step(arrays(1))
    spoilt = arrays(2)
    spoilt[0][0, 0] = np.nan
    run.step(spoilt)
    assert np.isnan(run.weights()[0]).any()
    assert all(np.isfinite(w).all() for w in run.weights()[1:])


def bad_options():
    for name, cases in BAD.items():
        for option, value in cases:
            yield EAGER["torch"], name, option, value, option
            # There a schedule may be a rate, and None is no decay.
            if option != "lr" and value is not None:
                named = "beta_1" if option == "betas" else KERAS_NAMES.get(option, option)
                yield InKeras, name, option, value, named


@pytest.mark.parametrize(("framework", "name", "option", "value", "named"), [*bad_options()])
def test_bad_options_are_errors(framework, name, option, value, named):
    with pytest.raises(ConfigError, match=named):
        framework.with_option(name, option, value)


@pytest.mark.parametrize("name", BAD)
def test_classes_show_their_options(name):
    formula = getattr(optimizers, name)
    names = [field.name for field in dataclasses.fields(formula)]
    for module, first in ((hvd_torch, "params"), (hvd_keras, "learning_rate")):
        cls = getattr(module, name)
        assert next(iter(inspect.signature(cls).parameters)) == first
        assert "Options:" in cls.__doc__
    found = inspect.signature(hvd_torch.__dict__[name]).parameters
    assert set(found) == {"params", *names}
    for option in names:
        assert option in formula.__doc__


@pytest.mark.parametrize("name", BAD)
def test_configurations_survive_saving(name):
    optimizer = getattr(hvd_keras, name)(0.25, weight_decay=0.125)
    config = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(optimizer)
    assert again.get_config() == optimizer.get_config()


@rows
def test_variables_may_be_left_out_of_decay(row):
    runs = []
    for decay, excluded in ((0.5, True), (None, False), (0.5, False)):
        v = keras.Variable(np.full((2, 2), 3.0), name="scale")
        options = {"learning_rate": 0.1, "weight_decay": decay}
        optimizer = getattr(hvd_keras, row.partition(":")[0])(**options)
        if excluded:
            optimizer.exclude_from_weight_decay(var_names=["scale"])
        optimizer.apply([tf.constant([[1.0, 2.0], [3.0, -1.0]])], [v])
        runs.append(v.numpy())
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


@rows
def test_groups_have_options_of_their_own(row):
    w, g, rates = np.array([[3.0, 4.0]]), np.array([[0.6, 0.8]]), (0.1, 0.2)
    ps = [torch.nn.Parameter(torch.tensor(w)) for _ in rates]
    for p in ps:
        p.grad = torch.tensor(g)
    own = [{"lr": rate, "weight_decay": rate} for rate in rates]
    groups = [{"params": [p], **options} for p, options in zip(ps, own, strict=True)]
    getattr(hvd_torch, row.partition(":")[0])(groups).step()
    for p, options in zip(ps, own, strict=True):
        expected, _ = type(formula_of(row))(**options).step(w, g, {}, optimizers.Now())
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-12)


@rows
def test_closures_give_the_loss(row):
    p = torch.nn.Parameter(torch.full((2, 2), 3.0))
    optimizer = getattr(hvd_torch, row.partition(":")[0])([p], lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = (p - 1).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses[4] < losses[0]


@eager
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        ("LARS", {"lr": 1.0, "momentum": 0.0}, 0.3),
        ("LAMB", {"lr": 0.01}, 3.0),
        ("OneBitAdam", {"lr": 1.0}, 1.0),
        ("OneBitLAMB", {"lr": 1.0}, 10.0),  # clipped
        ("ZeroOneAdam", {"lr": 1.0}, 1.0),
    ],
)
def test_first_steps_in_half_precision(row, options, expected, dtype, framework):
    """||w|| is 90000, which float16 has not; 0.999 is 1 in bfloat16."""
    options = options if row == "LARS" else {"eps": 1e-3, **options}
    if framework is InKeras:
        w = keras.Variable(np.full((300, 300), 300.0), dtype=dtype)
        named = {KERAS_NAMES.get(name, name): value for name, value in options.items()}
        getattr(hvd_keras, row)(**named).apply([tf.ones((300, 300), dtype)], [w])
        moved = 300 - tf.cast(w.value, tf.float32).numpy()
    else:
        p = torch.nn.Parameter(torch.full((300, 300), 300.0, dtype=getattr(torch, dtype)))
        p.grad = torch.ones_like(p)
        getattr(hvd_torch, row)([p], **options).step()
        moved = 300 - p.detach().float().numpy()
    close = 1.0 if dtype == "bfloat16" else 0.1
    np.testing.assert_allclose(moved, np.full((300, 300), expected), atol=close)


def torch_rate(decay, steps, **options):
    """The rate at each step, one after the other."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    warmup = hvd_torch.scaled_warmup(optimizer, steps=steps, **options)
    schedule = ChainedScheduler([warmup, MultiStepLR(optimizer, decay)])
    while True:
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()


def keras_rate(decay, steps, **options):
    values = [0.1 / 10**i for i in range(len(decay) + 1)]
    # That of Keras steps down behind its boundaries.
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([t - 1 for t in decay], values)
    warmup = hvd_keras.ScaledWarmup(rate, steps=steps, **options)
    return (float(warmup(t)) for t in itertools.count())


@pytest.mark.parametrize("rates", [torch_rate, keras_rate])
def test_scaled_warmup_is_goyals(rates):
    options = {"batch_size": 8192, "reference_batch_size": 256}
    for t, rate in zip(range(100), rates([30, 60], 20, **options), strict=False):
        whole = 0.1 + 3.1 * min(t / 20, 1)
        assert rate == pytest.approx(whole / 10 ** ((t >= 30) + (t >= 60)), rel=1e-5), t


@pytest.mark.parametrize("rates", [torch_rate, keras_rate])
@pytest.mark.parametrize(
    ("batch", "scaling", "steps", "rate"),
    [(16, "linear", 0, 0.4), (16, "sqrt", 0, 0.2), (2, "linear", 2, 0.05), (1, "sqrt", 9, 0.05)],
)
def test_warm_ups_without_steps_or_to_less(rates, batch, scaling, steps, rate):
    options = {"batch_size": batch, "reference_batch_size": 4, "scaling": scaling}
    found = itertools.islice(rates([99], steps, **options), 3)
    assert [*found] == pytest.approx([rate] * 3)
