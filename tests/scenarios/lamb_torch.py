"""1-bit LAMB in PyTorch: what is saved, unknown and refused."""

from __future__ import annotations

import io
import warnings

import torch

from hvd_compress.errors import ConfigError
from tests.scenarios.common import assert_same_everywhere as assert_same_model
from tests.scenarios.common import distribute, make_model
from tests.scenarios.common import train as train_model
from tests.scenarios.driver import hvd, raises


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
