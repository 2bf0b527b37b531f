"""This package's optimizers in every framework, with the compression that fits and with others,
beside NumPy's formulas of all ranks."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import numpy as np

from hvd_compress import (
    DGC,
    NoCompression,
    OneBitAdamCompression,
    ZeroOneAdamCompression,
    optimizers,
)
from hvd_compress.errors import ConfigError
from tests import adam_reference
from tests.scenarios import applies, oracle
from tests.scenarios.driver import (
    adam,
    allgather,
    assert_close,
    assert_same_everywhere,
    everything,
    hvd,
    lamb,
    lars,
    make,
    onebit_adam,
    onebit_lamb,
    raises,
    train,
    turned,
    zero_one_adam,
)

FREEZE = 10
LR = 2.0**-7  # the same number in every precision
SCHEDULE = {
    "var_freeze_step": 12,
    "var_update_scaler": 2,
    "local_step_scaler": 6,
    "local_step_clipper": 4,  # 1 2 4 6 8 12, then local
}


class _Adams:
    """One parameter on all ranks, by a class of ``adam_reference.py``."""

    def __init__(self, cls: Any, w: np.ndarray, norm: str = "l1", **options: Any) -> None:
        if betas := options.pop("betas", None):
            options["beta1"], options["beta2"] = betas
        more = ()
        if cls is adam_reference.ZeroOneAdam:
            options["freeze_step"], *more = (options.pop(key) for key in SCHEDULE)
        own = adam_reference.Options(lr=LR, norm=norm, **options)
        self.inner = cls(w, hvd.size(), own, *more)

    def step(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        found = self.inner.step(gradients)
        return found if isinstance(found, list) else [found] * hvd.size()


class _Formula:
    """The same by a formula of the package, on the average."""

    def __init__(self, cls: Any, w: np.ndarray, **options: Any) -> None:
        self.formula, self.w, self.state, self.steps = cls(lr=LR, **options), w, {}, 0

    def step(self, gradients: list[np.ndarray]) -> list[np.ndarray]:
        self.steps += 1
        now = optimizers.Now(step=self.steps)
        mean = sum(gradients) / len(gradients)
        self.w, self.state = self.formula.step(self.w, mean, self.state, now)
        return [self.w] * hvd.size()


def _one_bit(norm: str = "l1", **options: Any) -> OneBitAdamCompression:
    beta1, _ = options.get("betas", (0.9, 0.999))
    return OneBitAdamCompression(beta1, options["freeze_step"], norm, min_size=0)


def _zero_one(**options: Any) -> ZeroOneAdamCompression:
    return ZeroOneAdamCompression(**{key: options[key] for key in SCHEDULE}, min_size=0)


class Row(NamedTuple):
    """An optimizer by PyTorch's names of options, the compression that fits, and a reference."""

    make: Any
    options: dict[str, Any]
    method: Any
    reference: Any


def _by(reference: Any, cls: Any) -> Any:
    return functools.partial(reference, cls)


ROWS = {
    # The framework's own; that of Keras has another epsilon, and rounds betas to float32.  Before
    # its freeze, 1-bit Adam is Adam.
    "Adam": Row(
        *(adam, {"betas": (0.875, 1 - 2.0**-10), "eps": 1e-30}, None),
        _by(_Adams, adam_reference.OneBitAdam),
    ),
    "1-bit Adam": Row(
        *(onebit_adam, {"freeze_step": FREEZE}, _one_bit),
        _by(_Adams, adam_reference.OneBitAdam),
    ),
    "1-bit LAMB": Row(
        *(onebit_lamb, {"freeze_step": FREEZE}, _one_bit),
        _by(_Adams, adam_reference.OneBitLAMB),
    ),
    "0/1 Adam": Row(
        *(zero_one_adam, SCHEDULE, _zero_one),
        _by(_Adams, adam_reference.ZeroOneAdam),
    ),
    "LARS": Row(
        *(lars, {"trust_coefficient": 0.5, "weight_decay": 0.125}, None),
        _by(_Formula, optimizers.LARS),
    ),
    "LAMB": Row(
        *(lamb, {"weight_decay": 0.125, "eps": 1e-6}, None), _by(_Formula, optimizers.LAMB)
    ),
}


def run_of(name: str, method: Any = None, *, setup: Any = None, **options: Any) -> Any:
    """A run of the optimizer with these options; of the compression that fits unless given.
    ``setup``: more options of :func:`tests.scenarios.driver.make`."""
    row = ROWS[name]
    own = row.options | options
    fits = row.method(**own) if method is None else method
    own.pop("norm", None)
    inner = functools.partial(row.make, **own)
    return make(fits, **{"dtype": "float64", "lr": LR, "optimizer": inner, **(setup or {})})


def reference(
    name: str, steps: int, kind: str = "mlp", scale: int = 1, passes: int = 1, **options: Any
) -> oracle.Weights:
    """Return the weights of this rank after so many steps of all, on ``scale`` times the mean
    gradients of ``passes`` batches."""
    row, ranks = ROWS[name], range(hvd.size())
    weights = [oracle.initial_weights(kind, "float64") for _ in ranks]
    # The layout matters: shards are parts of the flat tensor.
    parts = {
        key: row.reference(turned(key, w), **(row.options | options))
        for key, w in weights[0].items()
    }
    for step in range(steps):
        batches = range(step * passes, (step + 1) * passes)
        found = [[oracle.gradients(kind, weights[r], r, i) for i in batches] for r in ranks]
        for key, part in parts.items():
            means = [sum(turned(key, g[key]) for g in own) / passes for own in found]
            for own, w in zip(weights, part.step([scale * mean for mean in means]), strict=True):
                own[key] = turned(key, w)
    return weights[hvd.rank()]


def they_follow_the_formulas() -> None:
    """Before a freeze and after it; the other options of formulas are those of the laws."""
    none, exact = NoCompression(), {"compressed": False}
    rows = (
        ("1-bit Adam", None, {"weight_decay": 0.125, "norm": "l2"}),
        ("1-bit Adam", None, {"betas": (0.8, 0.99), "bias_correction": False, "eps": 1e-3}),
        ("1-bit LAMB", None, {"weight_decay": 0.125, "bias_correction": False}),
        # With another compression, which does not know about momentum; small tensors are exact.
        ("1-bit LAMB", none, {"weight_decay": 0.125, **exact}),
        ("1-bit Adam", OneBitAdamCompression(0.9, FREEZE, min_size=10**6), exact),
        ("LAMB", none, {}),
        ("LARS", none, {}),
        ("0/1 Adam", ZeroOneAdamCompression(**SCHEDULE, min_size=10**6), exact),
        ("Adam", DGC(density=1.0, momentum=0.0), {}),
        # It averages in every step, as it would by itself if all local steps synchronized.
        ("0/1 Adam", none, {"local_step_clipper": 1, **exact}),
    )
    for name, method, options in rows if everything else (rows[0], rows[2]):
        own = {key: x for key, x in options.items() if key != "compressed"}
        run, has_local_steps = train(run_of(name, method, **own), range(25)), name == "0/1 Adam"
        if not has_local_steps:
            _assert_ranks_agree(run, averages=method is None)
        if has_local_steps or hvd.rank() == 0:  # who compares for all
            assert_close(run.weights(), reference(name, 25, **options), 1e-8, 1e-10)


@applies(over=("horovod", "mpi"))
def sums_are_averages_of_larger_gradients() -> None:
    """With an ``eps`` that does not vanish beside them."""
    for name in ("1-bit Adam", "0/1 Adam"):
        run = train(run_of(name, eps=1e-3, setup={"op": hvd.Sum}), range(25))
        expected = reference(name, 25, scale=hvd.size(), eps=1e-3)
        assert_close(run.weights(), expected, 1e-8, 1e-10)


def zero_one_adam_follows_its_formulas_between_synchronizations_too() -> None:
    run = run_of("0/1 Adam", weight_decay=0.125)
    for steps in range(1, 37):
        train(run, [steps - 1])
        interval = 1 if steps <= 18 else 2 if steps <= 24 else 4
        if steps <= SCHEDULE["var_freeze_step"] or steps % interval == 0:
            assert_same_everywhere(run.weights())
        if steps in (12, 21, 34, 35, 36):
            expected = reference("0/1 Adam", steps, weight_decay=0.125)
            assert_close(run.weights(), expected, rtol=1e-7, atol=1e-9)
        if steps == 5:  # before the local steps it changes nothing
            before = run.weights()
            run.optimizer.synchronize_parameters()
            assert_close(run.weights(), before, rtol=0, atol=0)
        if steps == 35 and hvd.size() > 1:
            with raises(AssertionError, "ranks diverged"):
                assert_same_everywhere(run.weights())
    train(run, [36])
    if graph := getattr(run, "graph", None):  # of TensorFlow
        assert graph.experimental_get_tracing_count() == 1
    for _ in range(2):  # the second time there is nothing new
        run.optimizer.synchronize_parameters()
        assert_same_everywhere(run.weights())


def most_local_steps_send_nothing() -> None:
    """Synchronizing in full gives the mean of the ranks' weights when nothing waits."""
    run = run_of("0/1 Adam", local_step_scaler=1, local_step_clipper=4)
    n, freeze = int(np.prod(oracle.WIDTHS[:2])), SCHEDULE["var_freeze_step"]
    bits, before = n / 8 * (1 + 1 / hvd.size()), 0
    for step in range(1, 25):
        train(run, [step - 1])
        count = _largest(run).bytes_sent - before
        if step in (1, 2, 4, 6, 8, 12):
            assert count == 8 * n
        elif step <= freeze or step in (13, 14, 16, 20, 24):
            # Headers, flags and scales of the bucket, most of which count to its largest tensor.
            assert bits <= count <= bits + 48 * (hvd.size() + 1), (step, count)
        else:
            assert count == 0, (step, count)
        if step == freeze + 2:
            run.optimizer.synchronize_parameters()  # nobody has moved, but something waits
            assert_same_everywhere(run.weights())
        if step == freeze + 3:
            means = {name: allgather(w[None]).mean(0) for name, w in run.weights().items()}
            run.optimizer.synchronize_parameters()
            assert_close(run.weights(), means, rtol=1e-10, atol=1e-12)
        before = _largest(run).bytes_sent


def _largest(run: Any) -> Any:
    layers = run.compression.stats().layers.values()
    return copy.copy(max(layers, key=lambda layer: layer.elements))


def _assert_ranks_agree(run: Any, averages: bool = True) -> None:
    """Bit for bit, in weights and in averages."""
    assert_same_everywhere(run.weights())
    assert all(np.isfinite(w).all() for w in run.weights().values())
    shared = {key: x for key, x in run.states().items() if key.endswith(".average")}
    assert not averages or len(shared) == len(run.weights())
    assert_same_everywhere(shared)


def one_bit_goes_each_way() -> None:
    run = train(run_of("1-bit Adam", setup={"dtype": "float32"}, freeze_step=3), range(3))
    before = _largest(run)
    n = before.elements // 3
    assert before.bytes_sent == 3 * 4 * n
    train(run, range(3, 7))
    after, ranks = _largest(run), hvd.size()
    # Shards to all, and the own shard once more; a scale each, and what the bucket's heads take.
    bits = n / 8 * (1 + 1 / ranks)
    each = (after.bytes_sent - before.bytes_sent) / 4
    assert bits <= each <= bits + 48 * (ranks + 1), (each, bits)
    each = (after.bytes_received - before.bytes_received) / 4
    bits = 2 * n / 8 * (ranks - 1) / ranks
    assert bits <= each <= bits + 48 * ranks, (each, bits)
    _assert_ranks_agree(run)  # above in double precision, here in single precision


def rows_travel_as_they_are_or_dense() -> None:
    """Dense, the momentum of words that never occur is told as one bit, which is never zero."""
    initial, unused = oracle.initial_weights("words", "float64"), slice(oracle.WORDS // 2, None)
    rows = (("1-bit Adam", False), ("1-bit Adam", True), ("0/1 Adam", True))
    for name, dense in rows if everything else rows[:2]:
        options = {"freeze_step": 5} if name == "1-bit Adam" else {}
        run = run_of(name, setup={"kind": "words", "sparse_as_dense": dense}, **options)
        steps = 20 if name == "0/1 Adam" else 12
        weights = train(run, range(steps)).weights()
        assert_same_everywhere(weights)
        np.testing.assert_array_equal(weights["embedding"][unused], initial["embedding"][unused])
        assert not np.array_equal(weights["embedding"][0], initial["embedding"][0])
        if dense and name == "1-bit Adam":  # the formulas of the other know no such words
            expected = reference(name, steps, kind="words", **options)
            assert_close(weights, expected, rtol=1e-7, atol=1e-9)


def _climbed(weights: oracle.Weights, found: oracle.Weights) -> oracle.Weights:
    norm = np.sqrt(sum(np.square(g).sum() for g in found.values()))
    return {name: w + 0.125 * found[name] / norm for name, w in weights.items()}


def sam_climbs_on_each_rank_or_to_one_point() -> None:
    """Then one gradient travels, as without it."""
    steps, ranks = 5, range(hvd.size())
    plain = train(make(NoCompression(), dtype="float64"), range(steps))
    sent = plain.compression.stats().total.bytes_sent
    for sam in ({"rho": 0.125}, {"rho": 0.125, "average": hvd.allreduce}):
        run = train(make(NoCompression(), dtype="float64", sam=sam), range(steps))
        weights = oracle.initial_weights("mlp", "float64")
        velocity = {name: 0 * w for name, w in weights.items()}
        for step in range(steps):
            found = [oracle.gradients("mlp", weights, rank, step) for rank in ranks]
            if "average" in sam:
                found = [{k: sum(g[k] for g in found) / len(ranks) for k in weights}] * len(ranks)
            points = [_climbed(weights, g) for g in found]
            found = [oracle.gradients("mlp", x, rank, step) for rank, x in enumerate(points)]
            for k in weights:
                velocity[k] = 0.9 * velocity[k] + sum(g[k] for g in found) / len(ranks)
                weights[k] = weights[k] - oracle.LR * velocity[k]
        assert_same_everywhere(run.weights())
        assert_close(run.weights(), weights, 1e-5, 1e-6)  # Keras rounds momentum to float32
        assert run.compression.stats().total.bytes_sent == sent > 0


def what_does_not_fit_is_refused() -> None:
    for name, method, *words in (
        ("1-bit Adam", OneBitAdamCompression(0.8, FREEZE), r"compressor\(\)"),
        ("1-bit Adam", OneBitAdamCompression(), "freeze_step=10"),
        ("0/1 Adam", ZeroOneAdamCompression(), "var_freeze_step=12"),
    ):
        with raises(ConfigError, "does not fit", *words):
            run_of(name, method)
    with raises(ConfigError, "onebit_adam", "Adam would take for gradients", "OneBitAdam"):
        make(OneBitAdamCompression(0.9, FREEZE), optimizer=adam)
    for method in ("onebit_adam", "zero_one_adam"):
        with raises(ConfigError, f"{method} hands out momenta", "SGD would take for gradients"):
            make(method)
