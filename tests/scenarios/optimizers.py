"""Optimizers with a compression of their own in every framework, beside NumPy's formulas of them.

0/1 Adam, whose ranks step on their own, has scenarios of its own: ``adam_zero_one.py``.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import numpy as np

from hvd_compress import NoCompression, OneBitAdamCompression
from hvd_compress.errors import ConfigError
from tests import adam_reference
from tests.scenarios import oracle
from tests.scenarios.driver import (
    adam,
    assert_close,
    assert_same_everywhere,
    everything,
    hvd,
    lamb,
    make,
    onebit_adam,
    onebit_lamb,
    raises,
    train,
    turned,
)

FREEZE = 10
LR = 2.0**-7  # the same number in every precision


class _Adams:
    """One parameter on all ranks, by a class of ``adam_reference.py``."""

    def __init__(self, cls: Any, w: np.ndarray, norm: str = "l1", **options: Any) -> None:
        if betas := options.pop("betas", None):
            options["beta1"], options["beta2"] = betas
        self.inner = cls(w, hvd.size(), adam_reference.Options(lr=LR, norm=norm, **options))

    def step(self, gradients: list[np.ndarray]) -> np.ndarray:
        return self.inner.step(gradients)


def _one_bit(norm: str = "l1", **options: Any) -> OneBitAdamCompression:
    beta1, _ = options.get("betas", (0.9, 0.999))
    return OneBitAdamCompression(beta1, options["freeze_step"], norm, min_size=0)


class Row(NamedTuple):
    """An optimizer by PyTorch's names of options, the compression that fits, and a reference."""

    make: Any
    options: dict[str, Any]
    method: Any
    reference: Any


ROWS = {
    "1-bit Adam": Row(
        *(onebit_adam, {"freeze_step": FREEZE}, _one_bit),
        functools.partial(_Adams, adam_reference.OneBitAdam),
    ),
    "1-bit LAMB": Row(
        *(onebit_lamb, {"freeze_step": FREEZE}, _one_bit),
        functools.partial(_Adams, adam_reference.OneBitLAMB),
    ),
}


def _run(
    name: str, method: Any = None, *, dtype: str = "float64", setup: Any = None, **options: Any
):
    """A run of the optimizer with these options; of the compression that fits unless given."""
    row = ROWS[name]
    own = row.options | options
    fits = row.method(**own) if method is None else method
    own.pop("norm", None)
    inner = functools.partial(row.make, **own)
    return make(fits, dtype=dtype, lr=LR, optimizer=inner, **(setup or {}))


def _reference(name: str, steps: int, kind: str = "mlp", **options: Any) -> oracle.Weights:
    weights, row = oracle.initial_weights(kind, "float64"), ROWS[name]
    # The layout matters: shards are parts of the flat tensor.
    parts = {
        key: row.reference(turned(key, w), **(row.options | options)) for key, w in weights.items()
    }
    for step in range(steps):
        found = [oracle.gradients(kind, weights, rank, step) for rank in range(hvd.size())]
        weights = {
            key: turned(key, part.step([turned(key, g[key]) for g in found]))
            for key, part in parts.items()
        }
    return weights


def they_follow_the_formulas() -> None:
    raw = {"betas": (0.8, 0.99), "bias_correction": False, "eps": 1e-3}
    # What options are by default is in another row, or in a scenario below.
    defaults = [(name, {}) for name in ROWS] if everything else []
    for name, options in (
        *defaults,
        ("1-bit Adam", {"weight_decay": 0.125, "norm": "l2"}),
        ("1-bit Adam", raw),
        ("1-bit LAMB", {"weight_decay": 0.125, "bias_correction": False}),
    ):
        run = train(_run(name, **options), range(25))
        assert_close(run.weights(), _reference(name, 25, **options), 1e-8, 1e-10)
        _assert_ranks_agree(run)


def without_their_compression_the_steps_are_the_same() -> None:
    """With another compression, which does not know about momentum; small tensors are exact."""
    for name, options in (("1-bit Adam", {}), ("1-bit LAMB", {"weight_decay": 0.125})):
        expected = _reference(name, 25, compressed=False, **options)
        methods = [NoCompression(), OneBitAdamCompression(0.9, FREEZE, min_size=10**6)]
        if not everything:
            methods = methods[name == "1-bit LAMB" :][:1]  # one each
        for method in methods:
            run = train(_run(name, method, **options), range(25))
            assert_close(run.weights(), expected, 1e-8, 1e-10)


def before_the_freeze_they_are_adam_and_lamb() -> None:
    betas = (0.875, 0.96875)
    if "torch" in adam.__module__:
        plain = functools.partial(adam, betas=betas, eps=1e-16)
    else:
        plain = functools.partial(adam, beta_1=betas[0], beta_2=betas[1], epsilon=1e-16)
    lambs = functools.partial(lamb, betas=betas, eps=2.0**-20, weight_decay=0.125)
    rows = [
        ("1-bit Adam", plain, "float64", 1e-9, {"eps": 1e-16}),
        ("1-bit Adam", plain, "float32", 1e-4, {"eps": 1e-16}),
        ("1-bit LAMB", lambs, "float64", 1e-9, {"eps": 2.0**-20, "weight_decay": 0.125}),
    ]
    for name, other, dtype, close, options in rows if everything else rows[:1]:
        theirs = train(make(NoCompression(), dtype=dtype, lr=LR, optimizer=other), range(20))
        run = _run(name, dtype=dtype, freeze_step=20, betas=betas, **options)
        assert_close(train(run, range(20)).weights(), theirs.weights(), rtol=close, atol=close)


def _assert_ranks_agree(run: Any) -> None:
    """Bit for bit, in weights and in averages."""
    assert_same_everywhere(run.weights())
    assert all(np.isfinite(w).all() for w in run.weights().values())
    shared = {key: x for key, x in run.states().items() if key.endswith(".average")}
    assert len(shared) == len(run.weights())
    assert_same_everywhere(shared)


def one_bit_goes_each_way() -> None:
    run = train(_run("1-bit Adam", dtype="float32", freeze_step=3), range(3))
    name = max(run.compression.stats().layers, key=lambda n: _layer(run, n).elements)
    before = _layer(run, name)
    n = before.elements // 3
    assert before.bytes_sent == 3 * 4 * n
    train(run, range(3, 7))
    after, ranks = _layer(run, name), hvd.size()
    # Shards to all, and the own shard once more; a scale each, and what the bucket's heads take.
    bits = n / 8 * (1 + 1 / ranks)
    each = (after.bytes_sent - before.bytes_sent) / 4
    assert bits <= each <= bits + 48 * (ranks + 1), (each, bits)
    each = (after.bytes_received - before.bytes_received) / 4
    bits = 2 * n / 8 * (ranks - 1) / ranks
    assert bits <= each <= bits + 48 * ranks, (each, bits)


def _layer(run: Any, name: str) -> Any:
    return copy.copy(run.compression.stats().layers[name])


def rows_travel_as_they_are() -> None:
    run = _run("1-bit Adam", setup={"kind": "words"}, freeze_step=5)
    train(run, range(12))
    assert_same_everywhere(run.weights())
    weights = oracle.initial_weights("words", "float64")
    never = weights["embedding"][oracle.WORDS // 2 :]
    np.testing.assert_array_equal(run.weights()["embedding"][oracle.WORDS // 2 :], never)
    assert not np.array_equal(run.weights()["embedding"][0], weights["embedding"][0])


def rows_may_be_made_dense() -> None:
    """Then the momentum of words that never occur is told as one bit, which is never zero."""
    run = _run("1-bit Adam", setup={"kind": "words", "sparse_as_dense": True}, freeze_step=5)
    train(run, range(12))
    expected = _reference("1-bit Adam", 12, kind="words", freeze_step=5)
    assert_close(run.weights(), expected, rtol=1e-8, atol=1e-10)
    initial, unused = oracle.initial_weights("words", "float64"), slice(oracle.WORDS // 2, None)
    stayed = run.weights()["embedding"][unused]
    np.testing.assert_array_equal(stayed, initial["embedding"][unused])


def they_learn() -> None:
    start = oracle.loss(oracle.initial_weights("mlp"))
    plain = oracle.loss(train(make(NoCompression(), lr=LR, optimizer=adam), range(150)).weights())
    for name in ROWS:
        run = train(_run(name, dtype="float32", freeze_step=40), range(150))
        _assert_ranks_agree(run)  # above in double precision, here in single precision
        reached = oracle.loss(run.weights())
        assert reached < 0.5 * start, (name, reached, start)
        if name == "1-bit Adam":
            assert reached < 1.15 * plain + 0.02 < 0.5 * start, (reached, plain, start)


def what_does_not_fit_is_refused() -> None:
    with raises(ConfigError, "does not fit", r"compressor\(\)"):
        _run("1-bit Adam", OneBitAdamCompression(0.8, FREEZE))
    with raises(ConfigError, "does not fit", "freeze_step=10"):
        _run("1-bit Adam", OneBitAdamCompression())
    with raises(ConfigError, "onebit_adam", "Adam would take for gradients", "OneBitAdam"):
        make(OneBitAdamCompression(0.9, FREEZE), optimizer=adam)
    for method in ("onebit_adam", "zero_one_adam"):
        with raises(ConfigError, f"{method} hands out momenta", "SGD would take for gradients"):
            make(method)
