"""Optimizers in PyTorch: what is saved, skipped, scaled, grouped, and refused."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvd_compress import NoCompression, OneBitAdamCompression, TopK
from hvd_compress.errors import ConfigError
from tests.devices import DEVICE
from tests.scenarios import horovod_only
from tests.scenarios.common import (
    User,
    as_distributed,
    as_plain,
    assert_close,
    assert_equal,
    assert_same_everywhere,
    begin,
    distribute,
    goes_on_from_a_checkpoint,
    loss_of,
    make_model,
    train,
    train_scaled,
    trains_as_plain,
)
from tests.scenarios.driver import hvd, raises
from tests.scenarios.driver import train as train_run
from tests.scenarios.optimizers import SCHEDULE, run_of

FREEZE = 4
#: options of optimizers, and of the compression that they make, if they do
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "OneBitAdam": ({"weight_decay": 0.01, "freeze_step": FREEZE}, {"min_size": 0}),
    "OneBitLAMB": ({"weight_decay": 0.01, "freeze_step": FREEZE}, {"min_size": 0}),
    "ZeroOneAdam": (SCHEDULE, {"min_size": 0}),
    "LARS": ({"lr": 2.0, "weight_decay": 0.01, "trust_coefficient": 0.01}, None),
    "LAMB": ({"weight_decay": 0.1}, None),
}


def _run(name: str, seed: int = 0, **options: Any) -> Any:
    own, compression = ROWS[name]
    model = make_model(seed)
    optimizer = getattr(hvd, name)(model.parameters(), **{"lr": 0.01, **own, **options})
    method = TopK(density=0.2) if compression is None else optimizer.compressor(**compression)
    return model, distribute(optimizer, model, method)


def options_survive_the_making_of_the_class() -> None:
    _, optimizer = _run("OneBitAdam", betas=(0.8, 0.9), eps=1e-5, bias_correction=False)
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["freeze_step"]) == ((0.8, 0.9), 1e-5, FREEZE)
    assert group["bias_correction"] is False
    assert optimizer.compression.method == OneBitAdamCompression(0.8, FREEZE, min_size=0)


def runs_go_on_from_their_checkpoints() -> None:
    """On each rank from its own state, before a freeze and after it: with the same bits.  The laws
    have what each optimizer keeps."""
    for name in ("OneBitAdam", "ZeroOneAdam", "LAMB"):
        for steps in (27,) if name == "ZeroOneAdam" else (2, 7):  # 32 synchronizes 0/1 Adam
            said = goes_on_from_a_checkpoint(lambda seed, n=name: _run(n, seed), steps, 5)
            found = any("optimizer.synchronize_parameters()" in text for text in said)
            assert found == (name == "ZeroOneAdam")


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
        states = state["state"].values()
        assert_same_everywhere([x for s in states for k, x in s.items() if k in ours])
        again, resumed = _run(name, seed=1)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(state)
        train(again, resumed, range(7, 10))
        assert_same_everywhere(again)
        # And those who join take it over.
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer, range(7, 10))
        assert_same_everywhere(model)


def zero_one_adam_goes_on_from_what_rank_0_saved_after_a_synchronization() -> None:
    model, optimizer = _run("ZeroOneAdam")
    train(model, optimizer, range(27))
    optimizer.synchronize_parameters()
    optimizer.consolidate_state_dict()
    again, resumed = _run("ZeroOneAdam", seed=1)
    again.load_state_dict(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(hvd.broadcast_object(state, 0, name="checkpoint"))
    for m, o in ((model, optimizer), (again, resumed)):
        train(m, o, range(27, 33))
        o.synchronize_parameters()
    assert_equal(again, model)


def checkpoints_of_another_kind_are_refused() -> None:
    """Before anything of them is assigned."""
    for name in ("OneBitAdam", "OneBitLAMB", "LAMB"):
        model, optimizer = _run(name)
        train(model, optimizer, range(2))
        optimizer.consolidate_state_dict()
        for slot in optimizer.formula.slots:
            state = copy.deepcopy(optimizer.state_dict())
            if slot.since is None and slot.kind == "array":
                del state["state"][0][slot.name]
                with raises(ConfigError, slot.name):
                    optimizer.load_state_dict(state)
                state["state"][0][slot.name] = torch.ones(3)
                with raises(ConfigError, slot.name, r"\[3\]"):
                    optimizer.load_state_dict(state)


def synchronizing_in_full_uses_up_the_residuals() -> None:
    run = run_of("0/1 Adam", local_step_scaler=1, local_step_clipper=1000)
    train_run(run, range(SCHEDULE["var_freeze_step"] + 2))  # 13 and 14 synchronize
    assert all("sync.residual" in s for s in run.optimizer.state.values())
    momentum = run.optimizer.state[run.model[0].weight]["exp_avg"].clone()
    run.optimizer.synchronize_parameters()  # nobody has moved, but something waits
    assert torch.equal(run.optimizer.state[run.model[0].weight]["exp_avg"], momentum)
    assert not any("sync.residual" in s for s in run.optimizer.state.values())


def steps_that_a_scaler_skips_leave_no_trace() -> None:
    """Around the freeze: after it, what is handed out is a momentum, however many were skipped."""
    (model, optimizer), (reference, plain) = _run("OneBitAdam"), _run("OneBitAdam")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    spoilt = (1, 3, 4, 7)
    for step in range(11):
        train_scaled(model, optimizer, scaler, [step], spoilt)
        if step not in spoilt:
            plain.compression.reducer.step = optimizer.compression.step - 1
            train(reference, plain, [step])
    state = optimizer.state[model[0].weight]
    assert (state["step"], state["variance_step"]) == (7, 2)  # of the first four, two
    assert_equal(model, reference)
    assert_same_everywhere(model)


def loss_scaling_and_rows_end_with_the_freeze_of_zero_one_adam() -> None:
    freeze = SCHEDULE["var_freeze_step"]
    run = train_run(run_of("0/1 Adam", setup={"kind": "words"}), range(freeze))
    with raises(ConfigError, "sparse_as_dense"):
        train_run(run, [freeze])
    model, optimizer = _run("ZeroOneAdam", var_freeze_step=1)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(2):
        scaler.scale(model(torch.ones(1, 40, device=DEVICE)).sum()).backward()
        if step:
            with raises(ConfigError, "loss scaling"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def groups_have_rates_of_their_own_and_one_compression() -> None:
    model = make_model()
    late = [{"params": list(model[2:].parameters()), "lr": 0.0, "weight_decay": 0.0}]
    adam = hvd.OneBitAdam([{"params": list(model[0].parameters())}, *late], lr=0.003)
    optimizer = distribute(adam, model, adam.compressor())
    before = copy.deepcopy(model)
    train(model, optimizer, range(2))
    assert not torch.equal(model[0].weight, before[0].weight)
    assert torch.equal(model[2].weight, before[2].weight)
    joined = torch.nn.Parameter(torch.ones(30))
    optimizer.add_param_group({"params": [joined], "lr": 0.1})
    for _ in range(6):
        optimizer.zero_grad()
        (joined * (hvd.rank() + torch.arange(30.0))).sum().backward()
        optimizer.step()
    assert_same_everywhere([joined])
    assert (joined < 1).all()
    for options in ({"freeze_step": 1}, {"betas": (0.5, 0.9)}):
        with raises(ConfigError, "does not fit"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], **options})
    adam = hvd.OneBitAdam(
        [{"params": [model[0].weight]}, {"params": [model[0].bias], "betas": (0.5, 0.9)}]
    )
    with raises(ConfigError, "does not fit"):
        hvd.DistributedOptimizer(adam, compression=adam.compressor())
    assert hvd.DistributedOptimizer(adam, compression=NoCompression()) is not None


def _sam_steps(user: User, method: Any, passes: int = 1, scaler: Any = None) -> Any:
    """Every rank's own climb, one after the other; of one rank, that of this process."""
    model = make_model()
    optimizer = user.begin(model, method, backward_passes_per_step=passes)
    sam = hvd.SAM(model, rho=0.1)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for step in range(6):
        optimizer.zero_grad()
        for rank in user.ranks:
            for number in range(step * passes, (step + 1) * passes):

                def loss(rank: int = rank, number: int = number) -> torch.Tensor:
                    return scaler.scale(loss_of(model, rank, number) / len(user.ranks))

                sam.backward(loss)
        scaler.step(optimizer)
        scaler.update()
    return model


def sam_climbs_in_each_pass_and_under_a_loss_scale() -> None:
    trains_as_plain(_sam_steps, NoCompression(), 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = as_distributed(_sam_steps, NoCompression(), 1, scaler)
    assert_close(model, as_plain(_sam_steps, NoCompression()))


@horovod_only
def horovods_own_optimizer_takes_them_too() -> None:
    def program(user: User, name: str) -> Any:
        model = make_model()
        inner = getattr(hvd, name)(model.parameters(), lr=0.01)
        user.train(model, user.distribute(inner, model, hvd.Compression.none), range(6))
        return model

    assert not hasattr(begin(hvd.Compression.none)[1], "compression")
    trains_as_plain(_sam_steps, hvd.Compression.none)
    for name in ("LARS", "LAMB"):
        trains_as_plain(program, name)
