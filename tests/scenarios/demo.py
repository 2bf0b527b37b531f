"""DeMo in every framework, beside NumPy's formulas of it."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from hvd_compress import DeMoCompression, NoCompression
from hvd_compress.errors import ConfigError
from tests.demo_reference import DeMo
from tests.scenarios import oracle
from tests.scenarios.driver import (
    allgather,
    assert_close,
    assert_same_everywhere,
    demo,
    hvd,
    make,
    raises,
    train,
    turned,
)

LR = 2.0**-8  # the same number in every precision
SMALL = {"decay": 0.875, "chunk": 8, "top_k": 4}


def _run(
    method: Any = None, *, kind: str = "mlp", dtype: str = "float64", rows: bool = False, **own: Any
) -> Any:
    options = {**SMALL, **own}
    if method is None:
        method = DeMoCompression(**{k: v for k, v in options.items() if k != "weight_decay"})
    more = {"sparse_as_dense": True} if rows else {}
    inner = functools.partial(demo, **options)
    return make(method, kind=kind, dtype=dtype, lr=LR, optimizer=inner, **more)


def _reference(steps: int, kind: str = "mlp", weight_decay: float = 0.0, **own: Any) -> Any:
    weights = oracle.initial_weights(kind, "float64")
    shapes = {name: turned(name, w).shape for name, w in weights.items()}
    parts = {name: DeMo(shape, hvd.size(), **{**SMALL, **own}) for name, shape in shapes.items()}
    for step in range(steps):
        found = [oracle.gradients(kind, weights, rank, step) for rank in range(hvd.size())]
        weights = {
            name: (1 - LR * weight_decay) * weights[name]
            - LR * turned(name, part.step([turned(name, g[name]) for g in found]))
            for name, part in parts.items()
        }
    return weights


def it_follows_the_formulas() -> None:
    for options in ({}, {"sign": False, "weight_decay": 0.125}, {"top_k": 2, "chunk": 16}):
        run = train(_run(**options), range(20))
        assert_close(run.weights(), _reference(20, **options), rtol=1e-6, atol=1e-6)
        assert_same_everywhere(run.weights())


def ranks_agree_on_weights_and_not_on_momenta() -> None:
    for dtype in ("float32", "float64"):
        run = train(_run(dtype=dtype), range(15))
        assert_same_everywhere(run.weights())
        momenta = run.states()
        assert momenta.keys() == {f"{name}.momentum" for name in run.weights()}
        everybodys = np.reshape(allgather(momenta["kernel0.momentum"]), (hvd.size(), -1))
        assert all((a != b).any() for a, b in itertools.pairwise(everybodys))


def it_sends_some_coefficients_a_chunk() -> None:
    run = train(_run(dtype="float32"), range(4))
    for name, layer in run.compression.stats().layers.items():
        kept = (layer.elements // 4) * 4 // 64 if layer.elements // 4 > 64 else None
        if kept is None:  # a bias, in chunks of 8
            kept = layer.elements // 8
        each = layer.bytes_sent / 4
        # A value takes 4 bytes, its place about 5.5 bits; a header and padding.
        assert 4 * kept < each < 5 * kept + 32, (name, each, kept)


def it_learns() -> None:
    run = train(_run(dtype="float32"), range(60))
    start = oracle.loss(oracle.initial_weights("mlp"))
    assert oracle.loss(run.weights()) < 0.5 * start


def rows_are_refused_unless_made_dense() -> None:
    with raises(ConfigError, "sparse_as_dense=True"):
        _run(kind="words").step(0)
    # All coefficients: of a chunk with one row in it many are equally large, and rounding decides.
    run = train(_run(kind="words", rows=True, top_k=64, sign=False), range(10))
    expected = _reference(10, kind="words", top_k=64, sign=False)
    assert_close(run.weights(), expected, rtol=1e-6, atol=1e-6)


def what_does_not_fit_is_refused() -> None:
    with raises(ConfigError, "does not fit", r"compressor\(\)"):
        _run(DeMoCompression(**{**SMALL, "top_k": 5}))
    with raises(ConfigError, "demo hands out momenta", "SGD would take for gradients", "DeMo"):
        make("demo")
    with raises(ConfigError, "takes no step", r"demo\.compressor\(\)"):
        _run(NoCompression()).step(0)
    for name, value in (("decay", 1.0), ("chunk", 0), ("top_k", 0.5), ("sign", 2)):
        with raises(ConfigError, name):
            _run(NoCompression(), **{name: value})
