"""0/1 Adam in every framework, beside NumPy's formulas of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from hvd_compress import NoCompression, ZeroOneAdamCompression
from hvd_compress.errors import ConfigError
from tests.adam_reference import Options, ZeroOneAdam
from tests.scenarios import oracle
from tests.scenarios.driver import (
    adam,
    allgather,
    assert_close,
    assert_same_everywhere,
    hvd,
    make,
    raises,
    train,
    turned,
    zero_one_adam,
)

LR = 2.0**-7  # the same number in every precision
FREEZE, UPDATES, SCALER, CLIPPER = 12, 2, 6, 4  # 1 2 4 6 8 12, then local
SCHEDULE = {
    "var_freeze_step": FREEZE,
    "var_update_scaler": UPDATES,
    "local_step_scaler": SCALER,
    "local_step_clipper": CLIPPER,
}


def run_of(dtype: str = "float64", method: Any = None, make_options: Any = None, **options: Any):
    """A run of the optimizer with these options; of the compression that fits unless given."""
    own = SCHEDULE | options
    schedule = {name: own[name] for name in SCHEDULE}
    method = method or ZeroOneAdamCompression(**schedule, min_size=0)
    inner = functools.partial(zero_one_adam, **own)
    return make(method, dtype=dtype, lr=LR, optimizer=inner, **(make_options or {}))


def _reference(steps: int, **options: Any) -> list[oracle.Weights]:
    """Of each rank."""
    ranks = hvd.size()
    weights = [oracle.initial_weights("mlp", "float64") for _ in range(ranks)]
    own = Options(lr=LR, freeze_step=FREEZE, **options)
    parts = {
        name: ZeroOneAdam(turned(name, w), ranks, own, UPDATES, SCALER, CLIPPER)
        for name, w in weights[0].items()
    }
    for step in range(steps):
        found = [oracle.gradients("mlp", weights[rank], rank, step) for rank in range(ranks)]
        for name, part in parts.items():
            for rank, p in enumerate(part.step([turned(name, g[name]) for g in found])):
                weights[rank][name] = turned(name, p)
    return weights


def it_follows_the_formulas() -> None:
    for options in ({}, {"bias_correction": False, "eps": 1e-4}, {"weight_decay": 0.125}):
        run = run_of(**options)
        for steps in range(1, 37):
            train(run, [steps - 1])
            interval = 1 if steps <= 18 else 2 if steps <= 24 else 4
            if steps <= FREEZE or steps % interval == 0:
                assert_same_everywhere(run.weights())
            if steps in (12, 17, 21, 22, 34, 35, 36):
                expected = _reference(steps, **options)[hvd.rank()]
                assert_close(run.weights(), expected, rtol=1e-7, atol=1e-9)


def between_synchronizations_ranks_are_on_their_own() -> None:
    run = train(run_of(), range(27))
    if hvd.size() > 1:
        with raises(AssertionError, "ranks diverged"):
            assert_same_everywhere(run.weights())
    run.optimizer.synchronize_parameters()
    assert_same_everywhere(run.weights())
    met = run.weights()
    run.optimizer.synchronize_parameters()  # nothing new
    assert_close(run.weights(), met, rtol=0, atol=0)
    train(run, range(27, 28))
    assert_same_everywhere(run.weights())


def synchronizing_in_full_gives_the_mean() -> None:
    """Of where the ranks are, when nothing waits."""
    run = run_of(local_step_scaler=1, local_step_clipper=1000)
    train(run, range(FREEZE + 2))  # 13 and 14 synchronize
    run.optimizer.synchronize_parameters()  # nobody has moved, but something waits
    assert_same_everywhere(run.weights())
    train(run, range(FREEZE + 2, FREEZE + 3))  # 15 does not
    means = {name: allgather(w[None]).mean(0) for name, w in run.weights().items()}
    run.optimizer.synchronize_parameters()
    assert_close(run.weights(), means, rtol=1e-10, atol=1e-12)


def synchronizing_before_the_local_steps_changes_nothing() -> None:
    run = train(run_of(), range(5))
    before = run.weights()
    run.optimizer.synchronize_parameters()
    assert_close(run.weights(), before, rtol=0, atol=0)


def most_local_steps_send_nothing() -> None:
    run = run_of("float32", local_step_scaler=1, local_step_clipper=4)
    sent = [0]
    for step in range(24):
        train(run, [step])
        layers = run.compression.stats().layers.values()
        sent.append(max(layers, key=lambda layer: layer.elements).bytes_sent)
    n = int(np.prod(oracle.WIDTHS[:2]))
    each = dict(enumerate(np.diff(sent), 1))
    bits = n / 8 * (1 + 1 / hvd.size())
    for step, count in each.items():
        if step in (1, 2, 4, 6, 8, 12):
            assert count == 4 * n
        elif step <= FREEZE or step in (13, 14, 16, 20, 24):
            # Headers, flags and scales of the bucket, most of which count to its largest tensor.
            assert bits <= count <= bits + 48 * (hvd.size() + 1), (step, count)
        else:
            assert count == 0, (step, count)


def it_learns_like_adam() -> None:
    losses = {}
    for name, run in (
        ("adam", make(NoCompression(), lr=LR, optimizer=adam)),
        ("0/1", run_of("float32", weight_decay=0.01, var_freeze_step=60, var_update_scaler=8)),
    ):
        train(run, range(160))
        losses[name] = oracle.loss(run.weights())
    start = oracle.loss(oracle.initial_weights("mlp"))
    assert losses["0/1"] < 1.2 * losses["adam"] + 0.03 < 0.6 * start, (losses, start)


def small_tensors_are_synchronized_exactly() -> None:
    method = ZeroOneAdamCompression(**SCHEDULE, min_size=10**6)
    run = train(run_of(method=method), range(26))
    expected = _reference(26, compressed=False)[hvd.rank()]
    assert_close(run.weights(), expected, rtol=1e-8, atol=1e-10)
    assert not run.states()


def without_its_compression_it_steps_on_averages() -> None:
    run = train(run_of("float32", NoCompression()), range(30))
    run.optimizer.synchronize_parameters()
    assert_same_everywhere(run.weights())


def dense_words_go_along() -> None:
    """Those that never occur have no scale, and stay where they are."""
    run = run_of(make_options={"kind": "words", "sparse_as_dense": True})
    train(run, range(20))
    assert_same_everywhere(run.weights())
    initial = oracle.initial_weights("words", "float64")["embedding"]
    unused = slice(oracle.WORDS // 2, None)
    np.testing.assert_array_equal(run.weights()["embedding"][unused], initial[unused])


def what_does_not_fit_is_refused() -> None:
    with raises(ConfigError, "does not fit", "var_freeze_step=12"):
        run_of(method=ZeroOneAdamCompression())
