"""1-bit LAMB in PyTorch, beside NumPy's formulas of it."""

from __future__ import annotations

import functools
import io
import warnings

import numpy as np
import torch

from hvd_compress import NoCompression, OneBitAdamCompression
from hvd_compress.errors import ConfigError
from tests.adam_reference import OneBitLAMB, Options
from tests.scenarios import oracle
from tests.scenarios.common import assert_same_everywhere as assert_same_model
from tests.scenarios.common import distribute, make_model
from tests.scenarios.common import train as train_model
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    hvd,
    make,
    raises,
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
        inner = functools.partial(hvd.OneBitLAMB, freeze_step=FREEZE, **own)
        run = train(make(method, dtype="float64", lr=LR, optimizer=inner), range(25))
        assert_close(run.weights(), _reference(25, compressed=compressed, **own), 1e-8, 1e-10)
        assert_same_everywhere(run.weights())


def before_the_freeze_it_is_lamb() -> None:
    ours, theirs = (
        functools.partial(cls, eps=1e-6, weight_decay=0.01) for cls in (hvd.OneBitLAMB, hvd.LAMB)
    )
    runs = [
        train(make(NoCompression(), dtype="float64", lr=LR, optimizer=inner), range(15))
        for inner in (ours, theirs)
    ]
    assert_close(runs[0].weights(), runs[1].weights(), 1e-9, 1e-12)


def it_learns() -> None:
    inner = functools.partial(hvd.OneBitLAMB, freeze_step=20)
    method = OneBitAdamCompression(0.9, 20)
    run = train(make(method, lr=2 * LR, optimizer=inner), range(80))
    start = oracle.loss(oracle.initial_weights("mlp"))
    assert oracle.loss(run.weights()) < 0.5 * start
    assert all(np.isfinite(w).all() for w in run.weights().values())


def a_run_goes_on_from_its_checkpoint() -> None:
    def fresh(seed: int):
        model = make_model(seed)
        lamb = hvd.OneBitLAMB(model.parameters(), lr=0.01, weight_decay=0.01, freeze_step=4)
        return model, distribute(lamb, model, lamb.compressor(min_size=0))

    for steps in (2, 7):
        model, optimizer = fresh(0)
        train_model(model, optimizer, range(steps))
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that residuals differ between ranks
            torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again, resumed = fresh(1)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(torch.load(file))
        for m, o in ((model, optimizer), (again, resumed)):
            train_model(m, o, range(steps, steps + 5))
        assert all(map(torch.equal, model.parameters(), again.parameters()))
        assert_same_model(model)


def what_cannot_be_stays_finite() -> None:
    """Parameters that are empty, or zero, or never had a gradient before the freeze."""
    sizes = (0, 5, 5)
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in sizes]
    lamb = hvd.OneBitLAMB(parameters, lr=0.1, freeze_step=2, weight_decay=0.1)
    for step in range(4):
        for p, factor in zip(parameters, (1, 1, step > 1), strict=True):
            p.grad = factor * torch.ones_like(p)
        lamb.step()
    assert all(torch.isfinite(p).all() for p in parameters)
    assert (parameters[1] < 0).all()
    assert (parameters[2] == 0).all()


def bad_options_are_errors() -> None:
    p = [torch.nn.Parameter(torch.ones(2))]
    for name, value in (
        ("freeze_step", 0),
        ("coefficient_range", (0.0, 1.0)),
        ("factor_range", (2.0, 1.0)),
        ("coefficient_beta", 1.0),
        ("factor_threshold", 0.0),
        ("eps", -1.0),
    ):
        with raises(ConfigError, name):
            hvd.OneBitLAMB(p, **{name: value})
