"""1-bit Adam in every framework, beside NumPy's formulas of it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np

from hvd_compress import NoCompression, OneBitAdamCompression
from hvd_compress.errors import ConfigError
from tests.adam_reference import OneBitAdam, Options
from tests.scenarios import oracle
from tests.scenarios.driver import (
    adam,
    assert_close,
    assert_same_everywhere,
    hvd,
    make,
    onebit_adam,
    raises,
    train,
    turned,
)

FREEZE = 10
LR = 2.0**-7  # the same number in every precision


def _run(method: Any = None, *, dtype: str = "float64", make_options: Any = None, **options: Any):
    """A run of the optimizer with these options; of the compression that fits unless given."""
    own = {"freeze_step": FREEZE, **options}
    beta1 = own.get("betas", (0.9, 0.999))[0]
    if method is None:
        method = OneBitAdamCompression(beta1, own["freeze_step"], min_size=0)
    inner = functools.partial(onebit_adam, **own)
    return make(method, dtype=dtype, lr=LR, optimizer=inner, **(make_options or {}))


def _reference(steps: int, ranks: int, kind: str = "mlp", **options: Any) -> oracle.Weights:
    weights = oracle.initial_weights(kind, "float64")
    own = Options(**{"lr": LR, "freeze_step": FREEZE, **options})
    # The layout matters: shards are parts of the flat tensor.
    parts = {name: OneBitAdam(turned(name, w), ranks, own) for name, w in weights.items()}
    for step in range(steps):
        found = [oracle.gradients(kind, weights, rank, step) for rank in range(ranks)]
        weights = {
            name: turned(name, part.step([turned(name, g[name]) for g in found]))
            for name, part in parts.items()
        }
    return weights


def it_follows_the_formulas() -> None:
    for own, theirs, norm in (
        ({}, {}, "l1"),
        ({"weight_decay": 0.125}, {"weight_decay": 0.125}, "l2"),
        (
            {"betas": (0.8, 0.99), "bias_correction": False, "eps": 1e-3},
            {"beta1": 0.8, "beta2": 0.99, "bias_correction": False, "eps": 1e-3},
            "l1",
        ),
    ):
        method = OneBitAdamCompression(theirs.get("beta1", 0.9), FREEZE, norm, min_size=0)
        run = train(_run(method, **own), range(30))
        expected = _reference(30, hvd.size(), norm=norm, **theirs)
        assert_close(run.weights(), expected, rtol=1e-8, atol=1e-10)
        assert_same_everywhere(run.weights())


def before_the_freeze_it_is_adam() -> None:
    betas = (0.875, 0.96875)  # Keras rounds them to float32
    if "torch" in adam.__module__:
        plain = functools.partial(adam, betas=betas, eps=1e-16)
    else:
        plain = functools.partial(adam, beta_1=betas[0], beta_2=betas[1], epsilon=1e-16)
    for dtype, close in (("float64", 1e-9), ("float32", 1e-4)):
        other = train(make(NoCompression(), dtype=dtype, lr=LR, optimizer=plain), range(20))
        run = train(_run(dtype=dtype, freeze_step=20, eps=1e-16, betas=betas), range(20))
        assert_close(run.weights(), other.weights(), rtol=close, atol=close)


def small_tensors_have_their_exact_momentum() -> None:
    method = OneBitAdamCompression(0.9, FREEZE, min_size=10**6)
    run = train(_run(method), range(30))
    assert_close(run.weights(), _reference(30, hvd.size(), compressed=False), 1e-8, 1e-10)


def without_compression_the_steps_are_the_same() -> None:
    """And with another compression, which does not know about momentum."""
    expected = _reference(30, hvd.size(), compressed=False)
    assert_close(train(_run(NoCompression()), range(30)).weights(), expected, 1e-8, 1e-10)


def ranks_stay_bitwise_equal() -> None:
    for dtype in ("float32", "float64"):
        run = train(_run(dtype=dtype), range(25))
        assert_same_everywhere(run.weights())
        assert all(np.isfinite(w).all() for w in run.weights().values())
        shared = {name: s for name, s in run.states().items() if name.endswith(".average")}
        assert len(shared) == len(run.weights())
        assert_same_everywhere(shared)


def it_sends_one_bit_each_way() -> None:
    run = train(_run(dtype="float32", freeze_step=3), range(3))
    name = max(run.compression.stats().layers, key=lambda n: _layer(run, n).elements)
    before = _layer(run, name)
    n = before.elements // 3
    assert before.bytes_sent == 3 * 4 * n
    sent, received = before.bytes_sent, before.bytes_received
    train(run, range(3, 7))
    after = _layer(run, name)
    ranks = hvd.size()
    # Shards to all, and the own shard once more; a head and a scale each.
    bits = n / 8 * (1 + 1 / ranks)
    each = (after.bytes_sent - sent) / 4
    assert bits <= each <= bits + 24 * (ranks + 1), (each, bits)
    each = (after.bytes_received - received) / 4
    bits = 2 * n / 8 * (ranks - 1) / ranks
    assert bits <= each <= bits + 48 * ranks, (each, bits)


def _layer(run: Any, name: str) -> Any:
    return copy.copy(run.compression.stats().layers[name])


def rows_travel_as_they_are() -> None:
    run = _run(make_options={"kind": "words"}, freeze_step=5)
    train(run, range(12))
    assert_same_everywhere(run.weights())
    weights = oracle.initial_weights("words", "float64")
    never = weights["embedding"][oracle.WORDS // 2 :]
    np.testing.assert_array_equal(run.weights()["embedding"][oracle.WORDS // 2 :], never)
    assert not np.array_equal(run.weights()["embedding"][0], weights["embedding"][0])


def words_that_never_occur_stay_where_they_are() -> None:
    """Dense, their momentum is told as one bit, which is never zero."""
    run = _run(make_options={"kind": "words", "sparse_as_dense": True}, freeze_step=5)
    train(run, range(20))
    expected = _reference(20, hvd.size(), kind="words", freeze_step=5)
    assert_close(run.weights(), expected, rtol=1e-8, atol=1e-10)
    initial = oracle.initial_weights("words", "float64")["embedding"]
    unused = slice(oracle.WORDS // 2, None)
    np.testing.assert_array_equal(run.weights()["embedding"][unused], initial[unused])


def it_learns_like_adam() -> None:
    losses = {}
    for name, run in (
        ("adam", make(NoCompression(), lr=LR, optimizer=adam)),
        ("1-bit", _run(dtype="float32", freeze_step=40)),
    ):
        train(run, range(150))
        losses[name] = oracle.loss(run.weights())
    start = oracle.loss(oracle.initial_weights("mlp"))
    assert losses["1-bit"] < 1.15 * losses["adam"] + 0.02 < 0.5 * start, (losses, start)


def what_does_not_fit_is_refused() -> None:
    good = OneBitAdamCompression(0.9, FREEZE)
    with raises(ConfigError, "does not fit", r"compressor\(\)"):
        _run(OneBitAdamCompression(0.8, FREEZE))
    with raises(ConfigError, "does not fit", "freeze_step=10"):
        _run(OneBitAdamCompression())
    with raises(ConfigError, "onebit_adam", "Adam would take for gradients", "OneBitAdam"):
        make(good, optimizer=adam)
    with raises(ConfigError, "SGD would take for gradients"):
        make(good)
    with raises(ConfigError, "freeze_step=0"):
        _run(NoCompression(), freeze_step=0)
