"""Scenarios of the DDP hook; ``torchrun tests/ddp_worker.py FOLDER`` runs them on every rank."""

from __future__ import annotations

import copy
import gc
import math
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.advisor import auto
from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.reduce.reducer import Reducer
from hvd_compress.torch import (
    BF16,
    DGC,
    FP16,
    Auto,
    DDPState,
    NoCompression,
    OneBit,
    RandomK,
    StagedWarmup,
    TopK,
    ddp_hook,
)
from hvd_compress.torch.process_groups import ProcessGroupEngine
from hvd_compress.torch.state.rank_states import own as own_states
from tests import group_worker
from tests.devices import DEVICE
from tests.group_worker import (
    assert_close,
    assert_equal,
    assert_no_trace_of_discarded,
    assert_refuses_loss_scale,
    assert_same_everywhere,
    assert_same_states,
    from_rank_0,
    loss_of,
    states_of,
    train,
)
from tests.in_nodes import lockstep
from tests.ring_method import Ring
from tests.scenarios import of_program

STEPS = 6
#: of every state; ``ddp_nodes_worker.py`` has nodes
OPTIONS: dict[str, Any] = {}
#: one that was made before there is a process group
EARLY: list[DDPState] = []
#: names of scenarios that say nothing of one rank alone
SEVERAL: set[str] = set()


def _of_several(scenario: Callable[[], None]) -> Callable[[], None]:
    SEVERAL.add(scenario.__name__)
    return scenario


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Linear(32, 5)
    ).to(DEVICE)


def _distributed(method, **options):
    """Small buckets, so that there are several."""
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
    state = DDPState(method, model, **OPTIONS, **options)
    model.register_comm_hook(state, ddp_hook)
    return model, state


def _lockstep(method, momentum=0.0):
    size = dist.get_world_size()
    return lockstep(method, STEPS, loss_of, momentum, _model(), size, lambda x: [x])


def trains_as_the_lockstep_world() -> None:
    for method in (
        NoCompression(),
        FP16(),
        BF16(),
        TopK(density=0.05),
        RandomK(density=0.1),
        DGC(density=0.05, momentum=0.9, min_size=0),
        OneBit(column=16),
        Ring(),
        Ring(equal=False),
    ):
        model, _ = _distributed(method)
        train(model, range(STEPS))
        assert_same_everywhere(model)
        if not isinstance(method, FP16 | BF16):  # which are rounded at every hop here
            assert_close(model, _lockstep(method))


def momentum_and_names() -> None:
    model, state = _distributed("dgc:density=0.05,indices=int32", momentum=0.9)
    train(model, range(STEPS))
    assert_close(model, _lockstep(DGC(density=0.05), momentum=0.9))
    record = state.stats().layers["0.weight"]
    assert record.steps == STEPS
    assert record.elements_sent == STEPS * 128
    # The header belongs to all tensors of the bucket.
    assert 8 * 128 <= record.bytes_sent / STEPS <= 8 * 128 + 16
    others = dist.get_world_size() - 1
    assert 8 * 128 * others <= record.bytes_received / STEPS <= (8 * 128 + 16) * others
    assert record.residual_norm > 0


def checkpoints_go_on() -> None:
    method = DGC(density=0.05, momentum=0.9)
    model, state = _distributed(method)
    train(model, range(3))
    weights = copy.deepcopy(model.module.state_dict())
    own, common = state.state_dict(consolidate=False), state.state_dict()
    residual = common["states"]["0.weight"]["residual"]
    total = own["states"]["0.weight"]["residual"].clone()
    dist.all_reduce(total)
    torch.testing.assert_close(residual * dist.get_world_size(), total)
    train(model, range(3, 6))
    again, later = _distributed(method)
    again.module.load_state_dict(weights)
    later.load_state_dict(own)
    train(again, range(3, 6))
    assert_close(model, again)  # DDP fuses in another way in its first steps
    later.load_state_dict(common)
    train(again, range(6, 8))
    assert_same_everywhere(again)


def a_checkpoint_may_have_all_ranks() -> None:
    """A rank that loads its own goes on with the same bits, and another number of ranks gets the
    mean."""
    model, state = _distributed("topk:density=0.05", residuals="ranks")
    train(model, range(3))
    weights, saved = copy.deepcopy(model.module.state_dict()), state.state_dict()
    rank, size = dist.get_rank(), dist.get_world_size()
    assert ("ranks" in saved) == (rank == 0)
    saved = from_rank_0(saved)
    again, later = _distributed("topk:density=0.05")
    again.module.load_state_dict(weights)
    later.load_state_dict(saved)
    for name, own in state.reducer.store.states.items():
        assert torch.equal(own["residual"], later.reducer.store.states[name]["residual"])
    for each in (model, again):
        train(each, range(3, 6))
    assert_equal(model, again)
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


@_of_several
def a_method_is_chosen_in_the_first_steps() -> None:
    text = "topk:density=0.05"
    method = Auto(steps=2)
    model, state = _distributed(method)
    with mock.patch.object(Auto, "choice", return_value=(text, "for a test")):
        train(model, range(8))
    assert_same_everywhere(model)
    assert state.stats().choice["method"] == text
    assert any(x["residual"].any() for x in state.reducer.store.states.values() if x)
    saved = copy.deepcopy(state.state_dict())
    again, other = _distributed(method)
    again.module.load_state_dict(model.module.state_dict())
    other.load_state_dict(saved)
    with mock.patch.object(auto, "measured_network", None):  # nothing is measured again
        train(again, range(8, 12))
    assert other.stats().choice["method"] == text
    assert_same_everywhere(again)


def a_loss_scale_is_refused_where_residuals_wait() -> None:
    for method, keeps in (("topk:density=0.05", True), ("fp16", False)):
        model, state = _distributed(method)
        loss = model(torch.ones(2, 40, device=DEVICE)).sum()
        if keeps:
            assert_refuses_loss_scale(loss, "topk keeps residuals")
        else:
            torch.amp.GradScaler("cpu", init_scale=2.0**10).scale(loss).backward()
            assert_same_everywhere(model)
        assert state.reducer.step == (not keeps)


def nan_reaches_every_rank_and_no_state() -> None:
    for method in (TopK(density=0.05), DGC(density=0.05, momentum=0.9), "powersgd"):
        model, state = _distributed(method)
        train(model, range(2))
        before = states_of(state)
        loss = loss_of(model, dist.get_rank(), 2)
        (loss * float("nan") if dist.get_rank() == 0 else loss).backward()
        for p in model.parameters():
            assert not torch.isfinite(p.grad).all()
        assert_same_states(states_of(state), before)


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
        train(each, range(STEPS))
    assert_equal(model, late_model)
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
        train(each, range(STEPS, 2 * STEPS))
    assert_same_everywhere(other)
    assert_close(other, late_model)
    assert again.reducer.step == 2 * STEPS


def a_state_may_be_made_before_the_process_group() -> None:
    model, _ = _distributed("topk:density=0.05")
    other = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
    other.register_comm_hook(EARLY[0], ddp_hook)
    for each in (model, other):
        train(each, range(STEPS))
    assert_equal(model, other)


def an_exception_in_the_middle_of_backward_ends_one_model_and_no_state() -> None:
    """Plain DDP says "Expected to have finished reduction" then; a new one goes on."""
    for early in (False, True):
        model = DistributedDataParallel(_model(), bucket_cap_mb=0.005)
        state = DDPState("topk:density=0.05", None if early else model)
        model.register_comm_hook(state, ddp_hook)
        train(model, range(2 - early))  # before any, or after some

        def fail(gradient):
            raise RuntimeError("in the middle")

        hook = model.module[0].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            train(model, range(1))
        hook.remove()
        assert state._buckets, "some were on their way"
        residuals = {n: dict(s) for n, s in state.reducer.store.states.items()}
        inner = model.module
        inner.zero_grad()
        del model, hook
        gc.collect()  # with its hooks
        again = DistributedDataParallel(inner, bucket_cap_mb=0.005)
        again.register_comm_hook(state, ddp_hook)
        train(again, range(2, 5))
        assert_same_everywhere(again)
        other, _ = _distributed("topk:density=0.05")
        train(other, range(2 - early))
        train(other, range(2, 5))
        assert_close(again, other)
        assert residuals.keys() <= state.reducer.store.states.keys()


def a_state_dict_of_other_names_is_refused() -> None:
    model, state = _distributed("topk:density=0.05")
    train(model, range(2))
    early = DDPState("topk:density=0.05")
    early.load_state_dict(state.state_dict())
    late_model = DistributedDataParallel(_model())
    late_model.register_comm_hook(early, ddp_hook)
    with pytest.raises(ConfigError, match=r"0\.bias.*with the model or without"):
        train(late_model, range(1))


def a_state_serves_one_model() -> None:
    for options in ({}, {"model": _model()}):
        state = DDPState("topk", **options)
        inner = options.get("model", _model())
        models = [DistributedDataParallel(m, bucket_cap_mb=0.005) for m in (inner, _model())]
        for model in models:
            model.register_comm_hook(state, ddp_hook)
        train(models[0], range(2))
        with pytest.raises(ConfigError, match="make one for each"):
            train(models[1], range(1))


class _Given(torch.nn.Module):
    """Parameters whose gradients are given numbers, of each rank and step."""

    def __init__(self, **parameters):
        super().__init__()
        for name, x in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(x.to(DEVICE)))
        self.names, self.step = list(parameters), 0

    def gradient(self, name, rank, step):
        p = getattr(self, name)
        generator = torch.Generator().manual_seed(100 * rank + step + 10 * self.names.index(name))
        real, imaginary = torch.randn(2, *p.shape, generator=generator).double()
        numbers = torch.complex(real, imaginary) if p.is_complex() else real
        return numbers.to(p.device, p.dtype)

    def mean(self, name, step):
        size = dist.get_world_size()
        return sum(self.gradient(name, rank, step) for rank in range(size)) / size

    def forward(self):
        self.step += 1
        rank = dist.get_rank()
        products = (
            getattr(self, name) * self.gradient(name, rank, self.step).conj() for name in self.names
        )
        return sum(x.real.sum().double() for x in products)


def _steps(parameters, method, steps, saved=None, **options):
    """The model, its state, and the averages of the last steps by name."""
    model = DistributedDataParallel(_Given(**parameters), bucket_cap_mb=0.0005, **options)
    state = DDPState(method, model, **OPTIONS)
    if saved is not None:
        state.load_state_dict(saved)
    model.register_comm_hook(state, ddp_hook)
    found = {name: [] for name in parameters}
    for step in steps:
        model.zero_grad()
        model.module.step = step - 1
        model().backward()
        for name, p in model.module.named_parameters():
            found[name].append(p.grad.clone())
    return model, state, found


def _layouts():
    image = torch.zeros(4, 3, 5, 2)
    return {
        "plain": torch.zeros(7, 3),
        "image": image.clone(),
        "image_last": image.to(memory_format=torch.channels_last),
        "turned": torch.zeros(6, 5).t(),
        "gaps": torch.zeros(6, 10)[:, ::2],
        "number": torch.zeros(()),
        "wide": torch.zeros(9, 2, dtype=torch.float64),
        "short": torch.zeros(5, 4, dtype=torch.bfloat16),
        "waves": torch.zeros(5, 3, dtype=torch.complex64),
        "waves_last": image.to(torch.complex64, memory_format=torch.channels_last),
        "wide_waves": torch.zeros(4, dtype=torch.complex128),
    }


def buckets_hold_parameters_of_every_kind() -> None:
    steps, kinds = range(1, 4), {**_layouts(), "nothing": torch.zeros(0, 3)}
    near = 0.03 if OPTIONS else 0.02  # sums of nodes are rounded once more
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        model, _, found = _steps(kinds, "none", steps, **options)
        for name, averages in found.items():
            for step, average in zip(steps, averages, strict=True):
                loose = {"rtol": near, "atol": near} if name == "short" else {}
                torch.testing.assert_close(average, model.module.mean(name, step), **loose)


def what_arrived_and_what_waits_are_all_gradients() -> None:
    """Element by element, of parameters of every kind."""
    steps = range(1, 4)
    model, state, found = _steps(_layouts(), "topk:density=0.3", steps)
    for name, averages in found.items():
        p = getattr(model.module, name)
        waits = state.reducer.store.states[name]["residual"].clone()
        dist.all_reduce(waits)
        waits = waits.view(*p.shape, 2) if p.is_complex() else waits.view(p.shape)
        waits = torch.view_as_complex(waits) if p.is_complex() else waits
        total = sum(averages) + waits / dist.get_world_size()
        right = sum(model.module.mean(name, step) for step in steps)
        loose = {"rtol": 0.05, "atol": 0.05} if name == "short" else {"check_dtype": False}
        torch.testing.assert_close(total.to(p.dtype), right, **loose)


def residuals_survive_a_change_of_memory_format() -> None:
    image = torch.zeros(4, 3, 5, 2)
    for method in ("topk:density=0.1", DGC(density=0.1, momentum=0.9, min_size=0), "powersgd"):
        plain, last = {"w": image}, {"w": image.to(memory_format=torch.channels_last)}
        _, _, expected = _steps(plain, method, range(1, 7))
        _, state, found = _steps(last, method, range(1, 4))
        saved = copy.deepcopy(state.state_dict(consolidate=False))
        _, _, later = _steps(plain, method, range(4, 7), saved)
        assert_close(found["w"] + later["w"], expected["w"], rtol=1e-5, atol=1e-6)


class _Known(torch.nn.Module):
    """One parameter with this gradient."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient.to(DEVICE)
        self.p = torch.nn.Parameter(torch.zeros_like(self.gradient))

    def forward(self):
        return (self.p * self.gradient).sum()


def _average(gradient, method, group=None, **options):
    model = DistributedDataParallel(_Known(gradient), process_group=group)
    model.register_comm_hook(DDPState(method, model, **OPTIONS, **options), ddp_hook)
    model().backward()
    return model.module.p.grad.cpu()


@_of_several
def sums_of_16_bits_do_not_overflow() -> None:
    """Neither where 16 bits travel, nor where gradients have no more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([40000.0, -65504.0, 60000.0 if rank == 0 else 0.0])
    means = torch.tensor([40000.0, -65504.0, 60000.0 / size])
    for method in ("fp16", "none", "randomk:density=1.0,wire=float16"):
        for dtype in (torch.float32, torch.float16):
            found = _average(own.to(dtype), method)
            torch.testing.assert_close(found.float(), means, rtol=1e-3, atol=0)
    too_large = torch.tensor([1e5 if rank == 0 else 0.0, 1.0])
    assert _average(too_large, "fp16").tolist() == [math.inf, 1.0]


def a_model_knows_its_process_group() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [[0], [*range(1, size)]] if size > 1 else [[0]]
    groups = [dist.new_group(part) for part in parts]
    mine, ranks = groups[rank > 0], parts[rank > 0]
    own, mean = torch.tensor([float(2**rank)]), sum(2.0**r for r in ranks) / len(ranks)
    for options in ({}, {"process_group": mine}):
        assert _average(own, "none", mine, **options).tolist() == [pytest.approx(mean)]
    if size > 1:
        with pytest.raises(ConfigError, match="leave process_group out of DDPState"):
            _average(own, "none", mine, process_group=dist.group.WORLD)


def replicas_of_a_tensor_parallel_model_are_averaged() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (size // 2, 2) if size % 2 == 0 else (size, 1)
    mesh = dist.init_device_mesh(DEVICE.type, shape, mesh_dim_names=("replica", "tensor"))

    def gradients(hooked):
        torch.manual_seed(0)
        layer = parallelize_module(
            torch.nn.Linear(4, 6).to(DEVICE), mesh["tensor"], ColwiseParallel()
        )
        model = DistributedDataParallel(layer, device_mesh=mesh["replica"])
        if hooked:
            model.register_comm_hook(DDPState("none", model), ddp_hook)
        (model(torch.ones(2, 4, device=DEVICE) * (1 + rank // shape[1])) ** 2).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    torch.testing.assert_close(gradients(True), gradients(False))


def what_is_no_bucket_of_dense_gradients_is_refused() -> None:
    model = DistributedDataParallel(torch.nn.Embedding(20, 4, sparse=True).to(DEVICE))
    model.register_comm_hook(DDPState("none", model), ddp_hook)
    with pytest.raises(UnsupportedError, match="sparse=False"):
        model(torch.tensor([dist.get_rank(), 5], device=DEVICE)).sum().backward()
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DistributedDataParallel(_model())
    model.register_comm_hook(DDPState("topk", model), ddp_hook)
    with pytest.raises(UnsupportedError, match=r"optimize_ddp = True"):
        loss_of(model, dist.get_rank(), 0).backward()


def a_static_graph_needs_a_state_that_knows_the_model() -> None:
    """In its first pass DDP calls every bucket the first, and none the last."""
    model = DistributedDataParallel(_Given(**_layouts()), static_graph=True)
    model.register_comm_hook(DDPState("topk"), ddp_hook)
    with pytest.raises(ConfigError, match=r"DDPState\(\.\.\., model\)"):
        model().backward()


class _Heads(torch.nn.Module):
    """Two heads, of which a step uses one, or another one on each rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(16, 32), torch.nn.Linear(16, 32)

    def forward(self, head, x):
        return getattr(self, head)(x).square().mean()


def _heads(method, static=False, **options):
    model = DistributedDataParallel(
        _Heads().to(DEVICE), find_unused_parameters=not static, static_graph=static, **options
    )
    state = DDPState(method, model, **OPTIONS)
    model.register_comm_hook(state, ddp_hook)
    return model, state


def _step_of(model, head, rank, step):
    random = torch.Generator().manual_seed(100 * step + rank)
    model.zero_grad()
    model(head, torch.randn(8, 16, generator=random).to(DEVICE)).backward()


def a_head_that_no_rank_used_keeps_its_state() -> None:
    for method in (TopK(density=0.1), DGC(density=0.1, momentum=0.9, min_size=1), OneBit()):
        for options in ({}, {"gradient_as_bucket_view": True}):
            model, state = _heads(method, **options)
            _step_of(model, "b", dist.get_rank(), 0)
            _step_of(model, "a", dist.get_rank(), 1)
            before = states_of(state)
            _step_of(model, "a", dist.get_rank(), 2)
            after = states_of(state)
            assert model.module.b.weight.grad is None
            for name in ("b.weight", "b.bias"):
                torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)
            assert (after["a.weight"]["residual"] != before["a.weight"]["residual"]).any()


def a_head_that_some_ranks_used_counts_as_zero_on_the_others() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model, _ = _heads(TopK(density=1.0))
    _step_of(model, "b" if rank == 0 else "a", rank, 0)
    alone = _Heads().to(DEVICE)
    _step_of(alone, "b", 0, 0)  # what rank 0 has
    torch.testing.assert_close(model.module.b.weight.grad, alone.b.weight.grad / size)


def all_parameters_of_a_static_graph_are_used() -> None:
    model, state = _heads(TopK(density=0.1), static=True)
    twin, its_state = _heads(TopK(density=0.1))
    for step in range(3):
        for each in (model, twin):
            _step_of(each, "a", dist.get_rank(), step)
        assert_same_states(states_of(state), states_of(its_state))
        torch.testing.assert_close(model.module.a.weight.grad, twin.module.a.weight.grad)


def hooks_of_a_state_end_with_it() -> None:
    model = _model()
    state = DDPState("topk", model)
    assert all(p._post_accumulate_grad_hooks for p in model.parameters())
    with pytest.warns(RuntimeWarning, match="has got no gradients"):
        del state
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def a_discarded_pass_leaves_no_trace() -> None:
    for method in (TopK(density=0.1), DGC(density=0.1, momentum=0.9), OneBit(), "powersgd"):
        assert_no_trace_of_discarded(_distributed, method)


@_of_several
def ranks_with_fewer_batches_join() -> None:
    """They send zeros, and what waits."""
    model, state = _distributed("topk:density=0.1")
    with model.join():
        train(model, range(2 + dist.get_rank()))
    assert state.reducer.step == 1 + dist.get_world_size()
    assert_same_everywhere(model)


@_of_several
def compiled_models_train_under_autocast() -> None:
    model = DistributedDataParallel(_model())  # Dynamo wants buckets of a megabyte or more
    state = DDPState("topk:density=0.5", model)
    model.register_comm_hook(state, ddp_hook)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(compiled, dist.get_rank(), step)
        loss.backward()
        optimizer.step()
    assert state.reducer.step == 3
    assert_same_everywhere(model)


@_of_several
def over_nccl_ranks_that_differ_learn_it_a_step_later() -> None:
    """The host does not wait for the comparison of the same step if messages stay on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupEngine, "_arrives_late", lambda engine, handle: True)
        model, state = _distributed("topk:density=0.5")
        train(model, range(3))
        state.reducer.step += dist.get_rank()
        train(model, range(3, 4))
        with pytest.raises(MismatchError, match=r"step\n    rank 0: 3\n    rank 1: 4"):
            train(model, range(4, 5))


def mistakes_are_errors() -> None:
    with pytest.raises(ConfigError, match="DDPState"):
        ddp_hook(None, None)
    for words, method, options in (
        ("give the optimizer momentum=0", "dgc", {"model": _model()}),
        ("leaves momentum to the optimizer", "topk", {"model": _model(), "momentum": 0.9}),
        ("leaves momentum to the optimizer", "topk", {"momentum": 0.9}),
        ("'all'", "topk", {"residuals": "all"}),
        ("model", "dgc", {"momentum": 0.9, "model": [_model()]}),
        ("model", "dgc", {"momentum": 0.9, "model": torch.nn.Linear}),
        ("process_group", "dgc", {"momentum": 0.9, "process_group": [0]}),
    ):
        with pytest.raises(ConfigError, match=words):
            DDPState(method, **options)
    model, state = _distributed("topk")
    for saved in (None, 3, [], {"states": 3}):
        with pytest.raises(ConfigError, match="nothing was changed"):
            state.load_state_dict(saved)
    train(model, range(1))  # or the state would warn that it was never used


def main() -> None:
    Reducer.keeps_engine = True  # on one rank, too: NCCL takes no more on a GPU
    EARLY.append(DDPState("topk:density=0.05"))
    group_worker.main(scenarios_of(int(os.environ["WORLD_SIZE"])))


SCENARIOS = of_program(globals())


def scenarios_of(ranks: int) -> dict[str, Callable[[], None]]:
    """Return those that say something with so many ranks."""
    return {name: f for name, f in SCENARIOS.items() if ranks > 1 or name not in SEVERAL}


if __name__ == "__main__":
    main()
