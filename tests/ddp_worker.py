"""Scenarios of the DDP hook; ``torchrun tests/ddp_worker.py FOLDER`` runs them on every rank."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import sys
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress import Gather, Max, Outcome, Sum
from hvd_compress.auto import pilot
from hvd_compress.base import Compressor
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import ConfigError
from hvd_compress.torch import (
    BF16,
    DGC,
    FP16,
    Auto,
    DDPState,
    GTopK,
    NoCompression,
    OneBit,
    RandomK,
    StagedWarmup,
    TopK,
    ddp_hook,
)
from hvd_compress.torch.rank_states import own as own_states
from tests.devices import DEVICE, start_process_group
from tests.ring_method import Ring
from tests.scenarios import run_all

STEPS = 6
#: one that was made before there is a process group
EARLY: list[DDPState] = []


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 5)
    ).to(DEVICE)


def _loss(model, rank, step):
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * rank + step)).to(DEVICE)
    return torch.nn.functional.cross_entropy(model(x), (x[:, :5] + 0.5 * x[:, 5:10]).argmax(1))


def _distributed(method, **options):
    """Small buckets, so that there are several."""
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
    state = DDPState(method, model, **options)
    model.register_comm_hook(state, ddp_hook)
    return model, state


def _train(model, steps, momentum=0.0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    for step in steps:
        optimizer.zero_grad()
        _loss(model, dist.get_rank(), step).backward()
        optimizer.step()


def _same_everywhere(model):
    mine = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    assert all(torch.equal(theirs, mine) for theirs in everyones)


def _lockstep(method, steps, momentum=0.0):
    model, size = _model(), dist.get_world_size()
    world = World(method, size)
    for step in range(steps):
        gradients = []
        for rank in range(size):
            model.zero_grad()
            _loss(model, rank, step).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            outcome = world.exchange([g[name] for g in gradients], name=name, momentum=momentum)[0]
            with torch.no_grad():
                p.add_(outcome.direction, alpha=-0.05)
    return model


def _assert_close(model, reference):
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-5)


def _assert_equal(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def trains_as_the_lockstep_world() -> None:
    for method in (
        NoCompression(),
        FP16(),
        BF16(),
        TopK(density=0.05),
        RandomK(density=0.1),
        DGC(density=0.05, momentum=0.9, min_size=0),
        OneBit(column=16),
        GTopK(density=0.05),
        GTopK(density=0.05, indices="int32"),
        Ring(),
        Ring(equal=False),
    ):
        model, _ = _distributed(method)
        _train(model, range(STEPS))
        _same_everywhere(model)
        if not isinstance(method, FP16 | BF16):  # which are rounded at every hop here
            _assert_close(model, _lockstep(method, STEPS))


def momentum_and_names() -> None:
    model, state = _distributed("dgc:density=0.05,indices=int32", momentum=0.9)
    _train(model, range(STEPS))
    _assert_close(model, _lockstep(DGC(density=0.05), STEPS, momentum=0.9))
    record = state.stats().layers["0.weight"]
    assert record.steps == STEPS
    assert record.elements_sent == STEPS * 128
    # The header belongs to all tensors of the bucket.
    assert 8 * 128 <= record.bytes_sent / STEPS <= 8 * 128 + 16
    others = dist.get_world_size() - 1
    assert 8 * 128 * others <= record.bytes_received / STEPS <= (8 * 128 + 16) * others
    assert record.residual_norm > 0


def dense_is_ddp() -> None:
    model, _ = _distributed("none")
    plain = DistributedDataParallel(_model())
    for each in (model, plain):
        _train(each, range(STEPS), momentum=0.9)
    _assert_close(model, plain)


def clipping_waits_for_the_last_bucket() -> None:
    model, _ = _distributed(DGC(density=0.05, momentum=0.9, clip_norm=1.0))
    _train(model, range(STEPS))
    _same_everywhere(model)


def checkpoints_go_on() -> None:
    method = DGC(density=0.05, momentum=0.9)
    model, state = _distributed(method)
    _train(model, range(3))
    weights = copy.deepcopy(model.module.state_dict())
    own, common = state.state_dict(consolidate=False), state.state_dict()
    residual = common["states"]["0.weight"]["residual"]
    total = own["states"]["0.weight"]["residual"].clone()
    dist.all_reduce(total)
    torch.testing.assert_close(residual * dist.get_world_size(), total)
    _train(model, range(3, 6))
    again, later = _distributed(method)
    again.module.load_state_dict(weights)
    later.load_state_dict(own)
    _train(again, range(3, 6))
    _assert_close(model, again)  # DDP fuses in another way in its first steps
    later.load_state_dict(common)
    _train(again, range(6, 8))
    _same_everywhere(again)


def a_checkpoint_may_have_all_ranks() -> None:
    """Who loads its own goes on with the same bits, and another number of ranks gets the mean."""
    model, state = _distributed("topk:density=0.05", residuals="ranks")
    _train(model, range(3))
    weights, saved = copy.deepcopy(model.module.state_dict()), state.state_dict()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert ("ranks" in saved) == (rank == 0)
    everyones = [saved]
    dist.broadcast_object_list(everyones)
    [saved] = everyones
    again, later = _distributed("topk:density=0.05")
    again.module.load_state_dict(weights)
    later.load_state_dict(saved)
    for name, own in state.reducer.store.states.items():
        assert torch.equal(own["residual"], later.reducer.store.states[name]["residual"])
    for each in (model, again):
        _train(each, range(3, 6))
    _assert_equal(model, again)
    everyones = [{"0.weight": states["0.weight"]} for states in saved["ranks"]]
    fewer = {
        **saved,
        "ranks": [*everyones, everyones[0]],  # one more than there are now
        "states": {"0.weight": saved["states"]["0.weight"]},
        "per_rank": {"0.weight": saved["per_rank"]["0.weight"]},
    }
    mean = own_states(fewer, rank, size)["states"]["0.weight"]["residual"]
    total = sum(each["0.weight"]["residual"] for each in fewer["ranks"])
    torch.testing.assert_close(mean * (size + 1), total)
    for damaged in ({"ranks": []}, {"ranks": [1] * size}, {"ranks": [{}] * size}, {"ranks": 1}):
        with pytest.raises(ConfigError, match="nothing was changed"):
            later.load_state_dict(saved | damaged)


@dataclasses.dataclass(frozen=True)
class _Rounds(Compressor, name="test-ddp-rounds"):
    """Three rounds of different kinds; payloads of different sizes."""

    def init(self, gradient):
        return {}

    def per_rank(self, gradient):
        return frozenset()

    def exchange(self, gradient, state, context):
        largest = yield Max(gradient.abs().view(-1))
        some = gradient.reshape(-1)[: context.rank + 1].clone().view(torch.uint8)
        parts = yield Gather(some)
        assert [p.numel() for p in parts] == [4 * (rank + 1) for rank in range(context.size)]
        total = yield Sum(gradient)
        assert (total.abs().view(-1) <= context.size * largest * 1.01).all()
        return Outcome(total / context.size, gradient, state)


def a_method_is_chosen_in_the_first_steps() -> None:
    if dist.get_world_size() == 1:
        return
    text = "topk:density=0.05"
    auto = Auto(methods=(text,), steps=2)
    model, state = _distributed(auto)
    seconds = {"none": 1.0, "fp16": 1.0, text: 0.1}
    with mock.patch.object(pilot, "decided", return_value=(text, "for a test", seconds)):
        _train(model, range(8))
    _same_everywhere(model)
    assert state.stats().choice["method"] == text
    assert any(x.any() for x in state.reducer.waiting().values())
    saved = copy.deepcopy(state.state_dict())
    again, other = _distributed(auto)
    again.module.load_state_dict(model.module.state_dict())
    other.load_state_dict(saved)
    with mock.patch.object(pilot, "measured_network", None):  # nothing is measured again
        _train(again, range(8, 12))
    assert other.stats().choice["method"] == text
    _same_everywhere(again)


def several_rounds() -> None:
    model, _ = _distributed(_Rounds())
    _train(model, range(3))
    _same_everywhere(model)
    _assert_close(model, _lockstep(NoCompression(), 3))


def nan_reaches_every_rank_and_no_state() -> None:
    model, state = _distributed(TopK(density=0.05))
    _train(model, range(2))
    before = {n: s["residual"].clone() for n, s in state.reducer.store.states.items()}
    loss = _loss(model, dist.get_rank(), 2)
    (loss * float("nan") if dist.get_rank() == 0 else loss).backward()
    for p in model.parameters():
        assert not torch.isfinite(p.grad).all()
    for name, residual in before.items():
        assert torch.equal(state.reducer.store.states[name]["residual"], residual)


def a_state_may_be_made_before_its_model() -> None:
    """Same bits as one that knew the model; so do warm-ups, checkpoints and names by place."""
    method = DGC(density=StagedWarmup("epoch", 1, (0.5, 0.05)), momentum=0.9, min_size=0)
    model, state = _distributed(method)
    early = DDPState(method)
    with pytest.warns(RuntimeWarning, match="has got no gradients"):
        assert early.stats().layers == {}
    late_model = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
    late_model.register_comm_hook(early, ddp_hook)
    for each in (state, early):
        each.set_epoch(0)
    for each in (model, late_model):
        _train(each, range(STEPS))
    _assert_equal(model, late_model)
    places = [name for name, _ in model.module.named_parameters()]
    for i, name in enumerate(places):
        expected, found = (
            s.reducer.store.states[n] for s, n in ((state, name), (early, f"parameter.{i}"))
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], x) for key, x in expected.items())
        assert early.stats().layers[f"parameter.{i}"].elements_sent > 0
    again = DDPState(method)
    again.load_state_dict(early.state_dict(consolidate=False))
    # Other buckets, and in them the parameters have the same places.
    other = DistributedDataParallel(copy.deepcopy(late_model.module), bucket_cap_mb=25)
    other.register_comm_hook(again, ddp_hook)
    for each in (late_model, other):
        _train(each, range(STEPS, 2 * STEPS))
    _same_everywhere(other)
    _assert_close(other, late_model)
    assert again.reducer.step == 2 * STEPS


def a_state_may_be_made_before_the_process_group() -> None:
    model, _ = _distributed("topk:density=0.05")
    other = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
    other.register_comm_hook(EARLY[0], ddp_hook)
    for each in (model, other):
        _train(each, range(STEPS))
    _assert_equal(model, other)


def an_exception_in_the_middle_of_backward_ends_one_model_and_no_state() -> None:
    """Plain DDP says "Expected to have finished reduction" then; a new one goes on."""
    for early in (False, True):
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
        state = DDPState("topk:density=0.05", None if early else model)
        model.register_comm_hook(state, ddp_hook)
        _train(model, range(2 - early))  # before any, or after some

        def fail(gradient):
            raise RuntimeError("in the middle")

        hook = model.module[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            _train(model, range(1))
        hook.remove()
        assert state._buckets, "some were on their way"
        residuals = {n: dict(s) for n, s in state.reducer.store.states.items()}
        inner = model.module
        inner.zero_grad()
        del model, hook
        gc.collect()  # with its hooks
        again = DistributedDataParallel(inner, bucket_cap_mb=0.005)
        again.register_comm_hook(state, ddp_hook)
        _train(again, range(2, 5))
        _same_everywhere(again)
        other, _ = _distributed("topk:density=0.05")
        _train(other, range(2 - early))
        _train(other, range(2, 5))
        _assert_close(again, other)
        assert residuals.keys() <= state.reducer.store.states.keys()


def a_state_dict_of_other_names_is_refused() -> None:
    model, state = _distributed("topk:density=0.05")
    _train(model, range(2))
    early = DDPState("topk:density=0.05")
    early.load_state_dict(state.state_dict())
    late_model = DistributedDataParallel(_model())
    late_model.register_comm_hook(early, ddp_hook)
    with pytest.raises(ConfigError, match=r"0\.bias.*with the model or without"):
        _train(late_model, range(1))


def a_state_serves_one_model() -> None:
    for options in ({}, {"model": _model()}):
        state = DDPState("topk", **options)
        inner = options.get("model", _model())
        models = [DistributedDataParallel(m, bucket_cap_mb=0.005) for m in (inner, _model())]
        for model in models:
            model.register_comm_hook(state, ddp_hook)
        _train(models[0], range(2))
        with pytest.raises(ConfigError, match="make one for each"):
            _train(models[1], range(1))


def mistakes_are_errors() -> None:
    with pytest.raises(ConfigError, match="give the optimizer momentum=0"):
        DDPState("dgc", _model())
    with pytest.raises(ConfigError, match="leaves momentum to the optimizer"):
        DDPState("topk", _model(), momentum=0.9)
    with pytest.raises(ConfigError, match="leaves momentum to the optimizer"):
        DDPState("topk", momentum=0.9)
    with pytest.raises(ConfigError, match="DDPState"):
        ddp_hook(None, None)
    with pytest.raises(ConfigError, match="'all'"):
        DDPState("topk", residuals="all")


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    EARLY.append(DDPState("topk:density=0.05"))
    start_process_group()
    run_all(sys.argv[1], dist.get_rank(), SCENARIOS, dist.barrier)
    dist.destroy_process_group()


SCENARIOS = {
    name: function
    for name, function in list(globals().items())
    if inspect.isfunction(function)
    and function.__module__ == __name__
    and not name.startswith("_")
    and name != "main"
}

if __name__ == "__main__":
    main()
