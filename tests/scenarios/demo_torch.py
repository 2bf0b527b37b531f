"""DeMo in PyTorch: what is saved, skipped, scaled, and refused."""

from __future__ import annotations

import copy
import io
import warnings

import torch

from hvd_compress.errors import ConfigError
from tests.scenarios.common import assert_same_everywhere, distribute, loss_of, make_model, train
from tests.scenarios.driver import hvd, raises


def _run(seed: int = 0, **options):
    model = make_model(seed)
    demo = hvd.DeMo(model.parameters(), lr=0.003, chunk=8, top_k=4, weight_decay=0.01)
    return model, distribute(demo, model, demo.compressor(), **options)


def _assert_equal(model, other) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def a_run_goes_on_from_its_checkpoint() -> None:
    """On each rank from its own momentum, with the same bits."""
    model, optimizer = _run()
    train(model, optimizer, range(5))
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that momenta differ between ranks
        torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again, resumed = _run(seed=1)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(torch.load(file))
    for m, o in ((model, optimizer), (again, resumed)):
        train(m, o, range(5, 10))
    _assert_equal(again, model)
    assert_same_everywhere(model)


def a_consolidated_checkpoint_has_the_mean_momentum() -> None:
    model, optimizer = _run()
    train(model, optimizer, range(5))
    own = optimizer.compression.state_of(model[0].weight)["momentum"].clone()
    optimizer.consolidate_state_dict()
    state = copy.deepcopy(optimizer.state_dict())
    saved = state["state"][0]
    assert saved.keys() == {"compression.momentum"}
    mean = hvd.allreduce(own, name="own momentum")
    torch.testing.assert_close(saved["compression.momentum"], mean)
    again, resumed = _run(seed=1)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    train(again, resumed, range(5, 8))
    assert_same_everywhere(again)


def steps_that_a_scaler_skips_leave_no_trace() -> None:
    """And scaled losses make the same steps, since a sign has no scale."""
    model, optimizer = _run()
    reference, plain = _run()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    for step in range(9):
        spoilt = step in (1, 3, 4)
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if spoilt and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not spoilt:
            train(reference, plain, [step])
    _assert_equal(model, reference)
    assert_same_everywhere(model)


def sums_make_the_same_steps() -> None:
    runs = [_run(op=op) for op in (hvd.Average, hvd.Sum)]
    for model, optimizer in runs:
        train(model, optimizer, range(5))
    _assert_equal(runs[0][0], runs[1][0])


def groups_have_rates_of_their_own_and_one_compression() -> None:
    model = make_model()
    late = [{"params": list(model[2:].parameters()), "lr": 0.0, "weight_decay": 0.0}]
    demo = hvd.DeMo([{"params": list(model[0].parameters())}, *late], lr=0.003)
    optimizer = distribute(demo, model, demo.compressor())
    before = copy.deepcopy(model)
    train(model, optimizer, range(2))
    assert not torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[2].weight, before[2].weight)
    with raises(ConfigError, "does not fit"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "top_k": 1})


def bad_options_are_errors() -> None:
    p = [torch.nn.Parameter(torch.ones(2))]
    for name, value in (("lr", -1.0), ("weight_decay", -0.1), ("decay", 1), ("top_k", 0)):
        with raises(ConfigError, name):
            hvd.DeMo(p, **{name: value})
    with raises(ConfigError, "values"):
        hvd.DeMo(p).compressor(values="int8")
