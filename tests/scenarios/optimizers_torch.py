"""Optimizers in PyTorch: what is saved, skipped, scaled, grouped, and refused."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import torch

from hvd_compress import NoCompression, OneBitAdamCompression, TopK
from hvd_compress.errors import ConfigError
from tests.scenarios.common import (
    assert_close,
    assert_same_everywhere,
    dense_reference,
    distribute,
    loss_of,
    make_model,
    train,
)
from tests.scenarios.driver import hvd, raises

FREEZE = 4
#: options of optimizers, and of the compression that they make, if they do
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "OneBitAdam": ({"lr": 0.01, "weight_decay": 0.01, "freeze_step": FREEZE}, {"min_size": 0}),
    "OneBitLAMB": ({"lr": 0.01, "weight_decay": 0.01, "freeze_step": FREEZE}, {"min_size": 0}),
    "LARS": ({"lr": 2.0, "weight_decay": 0.01, "trust_coefficient": 0.01}, None),
    "LAMB": ({"lr": 0.01, "weight_decay": 0.1}, None),
}
PARTNERS = [name for name, (_, compression) in ROWS.items() if compression is not None]


def _run(name: str, seed: int = 0, op: Any = None, **options: Any):
    own, compression = ROWS[name]
    model = make_model(seed)
    optimizer = getattr(hvd, name)(model.parameters(), **own | options)
    method = TopK(density=0.2) if compression is None else optimizer.compressor(**compression)
    return model, distribute(optimizer, model, method, **({} if op is None else {"op": op}))


def _assert_equal(model, other) -> None:
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def options_survive_the_making_of_the_class() -> None:
    _, optimizer = _run("OneBitAdam", betas=(0.8, 0.9), eps=1e-5, bias_correction=False)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["freeze_step"]) == ((0.8, 0.9), 1e-5, FREEZE)
    assert group["bias_correction"] is False
    assert optimizer.compression.method == OneBitAdamCompression(0.8, FREEZE, min_size=0)


def runs_go_on_from_their_checkpoints() -> None:
    """On each rank from its own state, before a freeze and after it: with the same bits."""
    for name in ROWS:
        for steps in (2, 7):
            model, optimizer = _run(name)
            train(model, optimizer, range(steps))
            file = io.BytesIO()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that residuals differ between ranks
                torch.save(optimizer.state_dict(), file)
            file.seek(0)
            again, resumed = _run(name, seed=1)
            again.load_state_dict(model.state_dict())
            resumed.load_state_dict(torch.load(file))
            assert resumed.compression.step == steps
            for m, o in ((model, optimizer), (again, resumed)):
                train(m, o, range(steps, steps + 5))
            _assert_equal(again, model)
            assert_same_everywhere(model)


def consolidated_checkpoints_serve_all_ranks() -> None:
    expected = {
        "OneBitAdam": (
            {"step", "variance_step", "exp_avg", "exp_avg_sq"},
            {"average", "residual", "owner_residual"},
        ),
        "LAMB": ({"step", "exp_avg", "exp_avg_sq"}, {"residual"}),
        "LARS": ({"velocity"}, {"residual"}),
    }
    for name, (keys, of_compression) in expected.items():
        model, optimizer = _run(name)
        train(model, optimizer, range(7))
        own = {
            k: x.clone() for k, x in optimizer.compression.store.state_of(model[0].weight).items()
        }
        optimizer.consolidate_state_dict()
        state = copy.deepcopy(optimizer.state_dict())
        saved = state["state"][0]
        ours = {f"compression.{key}" for key in of_compression}
        assert saved.keys() == keys | ours
        for key, x in own.items():
            mean = hvd.allreduce(x, name=f"own {name} {key}")
            torch.testing.assert_close(saved[f"compression.{key}"], mean)
        if name == "OneBitAdam":
            assert (saved["step"], saved["variance_step"]) == (7, FREEZE)
            momentum = saved["exp_avg"].view(-1)
            torch.testing.assert_close(saved["compression.average"], momentum)
        states = state["state"].values()
        assert_same_everywhere([x for s in states for k, x in s.items() if k in ours])
        again, resumed = _run(name, seed=1)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
        train(again, resumed, range(7, 10))
        assert_same_everywhere(again)


def those_who_join_take_over_the_state() -> None:
    for name in ROWS:
        model, optimizer = _run(name)
        if hvd.size() > 1:
            train(model, optimizer, range(6))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer, range(6, 9))
        assert_same_everywhere(model)


def steps_that_a_scaler_skips_leave_no_trace() -> None:
    """Around the freeze: after it, what is handed out is a momentum, however many were skipped."""
    for name in PARTNERS:
        model, optimizer = _run(name)
        reference, plain = _run(name)
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
                plain.compression.reducer.step = optimizer.compression.step - 1
                train(reference, plain, [step])
        state = optimizer.state[model[0].weight]
        assert (state["step"], state["variance_step"]) == (7, 2)  # of the first four, two
        _assert_equal(model, reference)
        assert_same_everywhere(model)


def sums_are_averages_at_another_rate() -> None:
    """Steps do not depend on the scale of the gradient."""
    runs = [_run("OneBitAdam", op=op, eps=0.0, weight_decay=0.0) for op in (hvd.Average, hvd.Sum)]
    for model, optimizer in runs:
        train(model, optimizer, range(10))
    for p, q in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def parameters_that_join_have_the_same_options() -> None:
    model, optimizer = _run("OneBitAdam")
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


def groups_have_rates_of_their_own_and_one_compression() -> None:
    model = make_model()
    late = [{"params": list(model[2:].parameters()), "lr": 0.0, "weight_decay": 0.0}]
    adam = hvd.OneBitAdam([{"params": list(model[0].parameters())}, *late], lr=0.003)
    optimizer = distribute(adam, model, adam.compressor())
    before = copy.deepcopy(model)
    train(model, optimizer, range(2))
    assert not torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[2].weight, before[2].weight)
    with raises(ConfigError, "does not fit"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "freeze_step": 1})
    adam = hvd.OneBitAdam(
        [{"params": [model[0].weight]}, {"params": [model[0].bias], "betas": (0.5, 0.9)}]
    )
    with raises(ConfigError, "does not fit"):
        hvd.DistributedOptimizer(adam, compression=adam.compressor())
    assert hvd.DistributedOptimizer(adam, compression=NoCompression()) is not None


def a_layer_that_thaws_after_the_freeze_stays_in_place() -> None:
    """Nothing is known of its scale."""
    model, optimizer = _run("OneBitAdam")
    model[0].requires_grad_(False)
    train(model, optimizer, range(6))
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    train(model, optimizer, range(6, 8))
    torch.testing.assert_close(model[0].weight, before * (1 - 0.01 * 0.01) ** 2)


def steps_of_lars_and_lamb_are_those_on_the_average() -> None:
    for name in ("LARS", "LAMB"):
        models = [make_model(), make_model()]
        local, alone = (getattr(hvd, name)(m.parameters(), **ROWS[name][0]) for m in models)
        train(models[0], distribute(local, models[0], NoCompression()), range(6))
        dense_reference(models[1], alone, range(6))
        assert_close(*models)
        assert_same_everywhere(models[0])


def options_of_the_compression_are_checked() -> None:
    p = [torch.nn.Parameter(torch.ones(2))]
    with raises(ConfigError, "norm"):
        hvd.OneBitAdam(p).compressor(norm="l3")
    with raises(ConfigError, "min_size"):
        hvd.OneBitAdam(p).compressor(min_size=-1)


def checkpoints_of_another_kind_are_refused() -> None:
    """Before anything of them is assigned."""
    for name in ROWS:
        model, optimizer = _run(name)
        train(model, optimizer, range(2))
        optimizer.consolidate_state_dict()
        for slot in optimizer.formula.slots:
            state = copy.deepcopy(optimizer.state_dict())
            if slot.since is None and slot.kind == "array":
                del state["state"][0][slot.name]
                if name != "LARS":  # which has nothing else before its first step either
                    with raises(ConfigError, slot.name):
                        optimizer.load_state_dict(state)
                state["state"][0][slot.name] = torch.ones(3)
                with raises(ConfigError, slot.name, r"\[3\]"):
                    optimizer.load_state_dict(state)
