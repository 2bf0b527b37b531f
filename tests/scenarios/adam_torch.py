"""1-bit Adam in PyTorch: what is saved, skipped, and refused."""

from __future__ import annotations

import copy
import io
import warnings

import torch

from hvd_compress import NoCompression, OneBitAdamCompression
from hvd_compress.errors import ConfigError
from tests.scenarios.common import assert_same_everywhere, distribute, loss_of, make_model, train
from tests.scenarios.driver import hvd, raises

FREEZE = 4


def _run(seed: int = 0, **options):
    model = make_model(seed)
    adam = hvd.OneBitAdam(
        model.parameters(), lr=0.01, weight_decay=0.01, freeze_step=FREEZE, **options
    )
    return model, distribute(adam, model, adam.compressor(min_size=0))


def _assert_equal(model, other) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def options_survive_the_making_of_the_class() -> None:
    _, optimizer = _run(betas=(0.8, 0.9), eps=1e-5, bias_correction=False)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["freeze_step"]) == ((0.8, 0.9), 1e-5, FREEZE)
    assert group["bias_correction"] is False
    assert optimizer.compression.method == OneBitAdamCompression(0.8, FREEZE, min_size=0)


def a_run_goes_on_from_its_checkpoint() -> None:
    """On each rank from its own state, before the freeze and after it: with the same bits."""
    for steps in (2, 7):
        model, optimizer = _run()
        train(model, optimizer, range(steps))
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that residuals differ between ranks
            torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again, resumed = _run(seed=1)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(torch.load(file))
        assert resumed.compression.step == steps
        for m, o in ((model, optimizer), (again, resumed)):
            train(m, o, range(steps, steps + 6))
        _assert_equal(again, model)
        assert_same_everywhere(model)


def a_consolidated_checkpoint_serves_all_ranks() -> None:
    model, optimizer = _run()
    train(model, optimizer, range(7))
    optimizer.consolidate_state_dict()
    state = copy.deepcopy(optimizer.state_dict())
    keys = {"step", "variance_step", "exp_avg", "exp_avg_sq"}
    ours = {f"compression.{key}" for key in ("average", "residual", "owner_residual")}
    assert state["state"][0].keys() == keys | ours
    assert state["state"][0]["step"] == 7
    assert state["state"][0]["variance_step"] == FREEZE
    torch.testing.assert_close(
        state["state"][0]["compression.average"], state["state"][0]["exp_avg"].view(-1)
    )
    assert_same_everywhere([x for s in state["state"].values() for k, x in s.items() if k in ours])
    again, resumed = _run(seed=1)
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(state)
    train(again, resumed, range(7, 12))
    assert_same_everywhere(again)


def those_who_join_take_over_the_state() -> None:
    model, optimizer = _run()
    if hvd.size() > 1:
        train(model, optimizer, range(6))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, range(6, 9))
    assert_same_everywhere(model)


def steps_that_a_scaler_skips_leave_no_trace() -> None:
    """Around the freeze: after it, what is handed out is a momentum, however many were skipped."""
    model, optimizer = _run()
    reference, plain = _run()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    for step in range(11):
        spoilt = step in (1, 3, 4, 7)
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if spoilt and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not spoilt:
            plain.compression.step = optimizer.compression.step - 1
            train(reference, plain, [step])
    assert optimizer.state[model[0].weight]["step"] == 7
    assert optimizer.state[model[0].weight]["variance_step"] == 2  # of the first four, two
    _assert_equal(model, reference)
    assert_same_everywhere(model)


def sums_are_averages_at_another_rate() -> None:
    """Adam's steps do not depend on the scale of the gradient, nor do those of 1-bit Adam."""
    runs = []
    for op in (hvd.Average, hvd.Sum):
        model = make_model()
        adam = hvd.OneBitAdam(model.parameters(), lr=0.01, eps=0.0, freeze_step=FREEZE)
        optimizer = distribute(adam, model, adam.compressor(), op=op)
        train(model, optimizer, range(10))
        runs.append(model)
    for p, q in zip(runs[0].parameters(), runs[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def parameters_that_join_have_the_same_options() -> None:
    model, optimizer = _run()
    train(model, optimizer, range(2))
    late = torch.nn.Parameter(torch.ones(30))
    optimizer.add_param_group({"params": [late], "lr": 0.1})
    for _ in range(6):
        optimizer.zero_grad()
        (late * (hvd.rank() + torch.arange(30.0))).sum().backward()
        optimizer.step()
    assert_same_everywhere([late])
    assert (late < 1).all()
    with raises(ConfigError, "does not fit"):
        other = torch.nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [other], "betas": (0.5, 0.9)})


def a_layer_that_thaws_after_the_freeze_stays_in_place() -> None:
    """Nothing is known of its scale."""
    model, optimizer = _run()
    model[0].requires_grad_(False)
    train(model, optimizer, range(6))
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    train(model, optimizer, range(6, 8))
    torch.testing.assert_close(model[0].weight, before * (1 - 0.01 * 0.01) ** 2)


def a_closure_gives_the_loss() -> None:
    model = make_model()
    adam = hvd.OneBitAdam(model.parameters(), freeze_step=1)

    def closure():
        adam.zero_grad()
        loss = loss_of(model, 0, 0)
        loss.backward()
        return loss

    losses = [adam.step(closure).item() for _ in range(4)]
    assert losses[3] < losses[0]


def bad_options_are_errors() -> None:
    p = [torch.nn.Parameter(torch.ones(2))]
    for name, value in (
        ("lr", -1.0),
        ("eps", -1.0),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("freeze_step", 0),
        ("freeze_step", True),
        ("freeze_step", 1.5),
    ):
        with raises(ConfigError, name):
            hvd.OneBitAdam(p, **{name: value})
    with raises(ConfigError, "norm"):
        hvd.OneBitAdam(p).compressor(norm="l3")
    with raises(ConfigError, "min_size"):
        OneBitAdamCompression(min_size=-1)
    model, _ = _run()
    adam = hvd.OneBitAdam(
        [{"params": [model[0].weight]}, {"params": [model[0].bias], "betas": (0.5, 0.9)}]
    )
    with raises(ConfigError, "does not fit"):
        hvd.DistributedOptimizer(adam, compression=adam.compressor())
    assert hvd.DistributedOptimizer(adam, compression=NoCompression()) is not None
