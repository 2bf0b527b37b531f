"""1-bit LAMB in every framework, beside NumPy's formulas of it."""

from __future__ import annotations

import functools

import numpy as np

from hvd_compress import NoCompression, OneBitAdamCompression
from tests.adam_reference import OneBitLAMB, Options
from tests.scenarios import oracle
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    hvd,
    lamb,
    make,
    onebit_lamb,
    train,
    turned,
)

FREEZE, LR = 10, 2.0**-7


def _reference(steps: int, **options) -> oracle.Weights:
    weights = oracle.initial_weights("mlp", "float64")
    own = Options(**{"lr": LR, "freeze_step": FREEZE, **options})
    parts = {name: OneBitLAMB(turned(name, w), hvd.size(), own) for name, w in weights.items()}
    for step in range(steps):
        found = [oracle.gradients("mlp", weights, rank, step) for rank in range(hvd.size())]
        weights = {
            name: turned(name, part.step([turned(name, g[name]) for g in found]))
            for name, part in parts.items()
        }
    return weights


def it_follows_the_formulas() -> None:
    for own, compressed in (
        ({}, True),
        ({"weight_decay": 0.125, "bias_correction": False}, True),
        ({"weight_decay": 0.125}, False),
    ):
        method = OneBitAdamCompression(0.9, FREEZE, min_size=0) if compressed else NoCompression()
        inner = functools.partial(onebit_lamb, freeze_step=FREEZE, **own)
        run = train(make(method, dtype="float64", lr=LR, optimizer=inner), range(25))
        assert_close(run.weights(), _reference(25, compressed=compressed, **own), 1e-8, 1e-10)
        assert_same_everywhere(run.weights())


def before_the_freeze_it_is_lamb() -> None:
    options = {"betas": (0.875, 0.96875), "eps": 2.0**-20}  # Keras rounds them to float32
    ours, theirs = (
        functools.partial(cls, weight_decay=0.125, **options) for cls in (onebit_lamb, lamb)
    )
    runs = [
        train(make(NoCompression(), dtype="float64", lr=LR, optimizer=inner), range(15))
        for inner in (ours, theirs)
    ]
    assert_close(runs[0].weights(), runs[1].weights(), 1e-9, 1e-12)


def it_learns() -> None:
    inner = functools.partial(onebit_lamb, freeze_step=20)
    method = OneBitAdamCompression(0.9, 20)
    run = train(make(method, lr=2 * LR, optimizer=inner), range(80))
    start = oracle.loss(oracle.initial_weights("mlp"))
    assert oracle.loss(run.weights()) < 0.5 * start
    assert all(np.isfinite(w).all() for w in run.weights().values())
