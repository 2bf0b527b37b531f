"""An object is not its memory: users give gradients, parameters and states other memory between
steps, and a hook holds nothing that holds the hook."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import fully_shard

import hvd_compress.torch.mpi as hvd
from hvd_compress.errors import CompressionError
from hvd_compress.torch import backend
from hvd_compress.torch.ddp.hook import DDPState, ddp_hook
from tests.scenarios.common import batch, loss_of, make_model, sgd

hvd.init()

METHODS = ["none", "fp16", "dgc:density=0.05", "topk:density=0.05", "powersgd", "onebit", "ef21"]
STEPS = 5


def distributed(model, method, **options):
    return hvd.DistributedOptimizer(
        sgd(model, **options), named_parameters=model.named_parameters(), compression=method
    )


def step_of(model, optimizer, number):
    optimizer.zero_grad()
    loss_of(model, 0, number).backward()
    optimizer.step()


def trained(method, disturb=lambda when, model, optimizer: None, **options):
    """The parameters after some steps; ``disturb`` is called at three places of each."""
    model = make_model()
    optimizer = distributed(model, method, **options)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        disturb("before backward", model, optimizer)
        loss_of(model, 0, step).backward()
        disturb("before step", model, optimizer)
        optimizer.step()
        disturb("after step", model, optimizer)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def moved(x):
    x.data = x.data.clone()


def moved_to(x):
    x.data = x.data.to("cpu", copy=True)


def with_other_strides(x):
    spread = torch.empty(*x.shape, 2)[..., 0]
    x.data = spread.copy_(x.data)


def set_elsewhere(x):
    x.set_(x.detach().clone())


def kept_and_moved(x, kept=[]):  # noqa: B006  # what was freed must not be taken for what is new
    kept.append(x.data)
    del kept[:-20]
    x.data = x.data.clone()


def tensors_of(kind, model, optimizer):
    if kind == "gradients":
        return [p.grad for p in model.parameters() if p.grad is not None]
    if kind == "parameters":
        return list(model.parameters())
    entries = (e for state in optimizer.state.values() for e in state.values())
    return [x for x in entries if isinstance(x, torch.Tensor) and x.is_floating_point()]


@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["gradients", "parameters", "states"])
@pytest.mark.parametrize(
    "move",
    [
        moved,
        moved_to,
        with_other_strides,
        set_elsewhere,
        kept_and_moved,
        torch.Tensor.share_memory_,
    ],
)
def test_other_memory_with_the_same_numbers_changes_nothing(method, kind, move):
    """At any time: what is in flight while it is moved arrives in the new memory."""
    expected = trained(method)

    def disturb(when, model, optimizer):
        with torch.no_grad():
            for x in tensors_of(kind, model, optimizer):
                move(x)

    found = trained(method, disturb)
    if kind == "parameters" or move is with_other_strides:  # matrix products add in another order
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("method", METHODS)
def test_memory_that_is_exchanged_between_states(method):
    """Two states that share memory, and a state in the memory of an earlier one, which the loops
    would write to."""
    kept = []

    def disturb(when, model, optimizer):
        if when != "after step":
            return
        states = tensors_of("states", model, optimizer)
        for x, old in zip(states, kept[0] if kept else (), strict=False):
            if old.shape == x.shape and old.dtype == x.dtype:
                numbers = x.data.clone()
                old.data.copy_(numbers)
                x.data = old.data
        kept[:] = [states]

    assert torch.equal(trained(method, disturb), trained(method))


def resized(x):
    x.data = x.data.new_zeros(max(1, x.numel() // 4))


def enlarged(x):
    x.data = x.data.new_zeros(4 * x.numel())


def resized_in_place(x):
    x.data = x.data.clone().resize_(2 * x.numel())


def in_double(x):
    x.data = x.data.double()


def nowhere(x):
    x.data = torch.empty_like(x.data, device="meta")


@pytest.mark.parametrize("method", ["dgc:density=0.05", "topk:density=0.05", "onebit", "powersgd"])
@pytest.mark.parametrize("change", [resized, enlarged, resized_in_place, in_double, nowhere])
def test_states_of_another_kind_are_refused(method, change):
    def disturb(when, model, optimizer):
        if when == "after step" and optimizer.compression.step == 3:
            for x in tensors_of("states", model, optimizer):
                change(x)

    with pytest.raises((CompressionError, RuntimeError)) as caught:
        trained(method, disturb)
    if change is not nowhere:
        assert "instead of" in str(caught.value), caught.value


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", [resized, enlarged])
@pytest.mark.parametrize("place", ["before backward", "before step", "after step"])
def test_parameters_and_gradients_that_do_not_fit(method, change, place):
    """As plain SGD, which refuses them too."""
    at = 3 if place == "before backward" else 2  # where zero_grad() has left gradients

    for kind in ("parameters", "gradients"):

        def disturb(when, model, optimizer, kind=kind):
            if when == place and optimizer.compression.step == at:
                for x in tensors_of(kind, model, optimizer):
                    change(x)

        if kind == "gradients" and place == "after step":
            trained(method, disturb)  # zero_grad() drops them, or the next backward would refuse
            continue
        with pytest.raises((CompressionError, RuntimeError)):
            trained(method, disturb)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_stay_where_they_are(method):
    """In a flat buffer, which its owner puts to zero: with lr = 0 and one batch every step has the
    same gradient, up to what was kept back before."""
    model = make_model()
    optimizer = distributed(model, method, lr=0.0, momentum=0.0)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    views, start = [], 0
    for p in model.parameters():
        p.grad = flat[start : start + p.numel()].view_as(p)
        views.append(p.grad.data_ptr())
        start += p.numel()
    norms = []
    for _ in range(3):
        flat.zero_()
        loss_of(model, 0, 0).backward()
        plain = flat.clone()
        optimizer.step()
        assert [p.grad.data_ptr() for p in model.parameters()] == views
        norms.append((flat.norm() / plain.norm()).item())
        direction = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        assert torch.equal(direction, flat)
        flat.zero_()
        optimizer._synchronized = False
    if method in ("none", "fp16"):
        assert all(abs(norm - 1) < 0.01 for norm in norms), norms


@pytest.mark.parametrize("method", METHODS)
def test_gradients_whose_elements_share_memory(method):
    """As ``expand`` makes them, and plain optimizers take them; backward never leaves such."""
    found = []
    for made in (lambda x: x, torch.Tensor.clone):
        model = make_model()
        optimizer = distributed(model, method)
        for _ in range(3):
            for p in model.parameters():
                p.grad = made(torch.full((1,), 0.5).expand(p.shape))
            optimizer.step()
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("method", METHODS)
def test_a_checkpoint_of_parameters_in_another_memory_format(method):
    found = []
    for is_loaded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        optimizer = distributed(model, method, weight_decay=0.1)
        for step in range(4):
            if is_loaded and step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            model(torch.ones(1, 3, 5, 5)).square().sum().backward()
            optimizer.step()
        found.append(model.weight.detach())
    assert torch.equal(*found)


def test_momentum_that_changes_in_every_step_plans_once():
    """OneCycleLR does that by default."""
    model = make_model()
    optimizer = distributed(model, "dgc:density=0.05")
    groups = optimizer.param_groups
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
    exchanges, plans = [], []
    for step in range(12):
        step_of(model, optimizer, step)
        schedule.step()
        plans.append(optimizer.compression.reducer.buckets.plan)
        in_use = optimizer.compression.reducer._plans.values()
        exchanges.append([each.plan for each in in_use])
    assert len({groups[0]["momentum"]} | {0.9}) == 2
    assert all(plan is plans[0] for plan in plans)
    assert len(exchanges[1]) == len(plans[0])
    for own in exchanges[2:]:
        assert all(plan is first for plan, first in zip(own, exchanges[1], strict=True))


def test_a_group_that_is_replaced_counts_from_then_on():
    """By a scheduler that makes new ones, say."""
    found = []
    for replaced in (True, False):
        model = make_model()
        optimizer = distributed(model, "dgc:density=0.05")
        for step in range(STEPS):
            if step == STEPS // 2:
                new = optimizer.param_groups[0] | {"momentum": 0.3}
                if replaced:
                    optimizer.param_groups[0] = new
                else:
                    optimizer.param_groups[0].update(new)
            step_of(model, optimizer, step)
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*found)


# -- what is no plain tensor -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_parameters_that_are_no_plain_tensors_are_refused(alone):
    with FakeTensorMode():
        fake = torch.nn.Linear(40, 5)
    sharded = make_model()
    fully_shard(sharded, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    for model, word in (
        (fake, "FakeTensor.*FakeTensorMode"),
        (make_model().to("meta"), "Parameter on the device meta.*the real model"),
        (sharded, "DTensor.*DistributedDataParallel"),
    ):
        for method in METHODS:
            with pytest.raises(hvd.UnsupportedError, match=f"weight', which is a {word}"):
                distributed(model, method)


class Watched(torch.Tensor):
    """A subclass that sees every operation, as DTensor does."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        with torch._C._DisableTorchDispatch():
            return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_are_no_plain_tensors_are_refused(method):
    model = make_model()
    optimizer = distributed(model, method)
    for step in range(2):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        if step:
            model[0].weight.grad = torch.Tensor._make_subclass(Watched, torch.zeros(64, 40))
            with pytest.raises(hvd.UnsupportedError, match="cannot compress what is a Watched"):
                optimizer.step()
            optimizer.zero_grad()
        else:
            optimizer.step()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arrays_that_are_no_plain_tensors():
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    odd = [quantised, torch.zeros(3, 4).to_sparse_csr(), torch.zeros(3, device="meta")]
    torch.func.vmap(lambda x: odd.append(x) or x)(torch.zeros(2, 3))
    for x in odd:
        with pytest.raises(hvd.UnsupportedError, match="cannot compress"):
            backend.check_gradient(x)


# -- what is held, and by whom ---------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_what_is_dropped_is_freed(method):
    """Parameters, gradients and states, without the collector's help for what exchanges."""
    gc.collect()
    model = make_model()
    optimizer = distributed(model, method)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    entries = tensors_of("states", model, optimizer)
    held = [
        weakref.ref(x) for x in (*model.parameters(), *tensors_of("gradients", model, optimizer))
    ]
    held += [weakref.ref(optimizer), *map(weakref.ref, entries)]
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer, entries
        assert gone() is None, "its hooks would go on exchanging until the collector comes"
    finally:
        gc.enable()
    loss_of(model, 0, 1).backward()  # into nobody's hooks
    del model
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("method", ["none", "dgc:density=0.05,momentum=0.9", "powersgd", "onebit"])
def test_what_a_hook_of_ddp_has_seen_is_freed(method, alone):
    model = make_model()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    state = DDPState(method, parallel)
    parallel.register_comm_hook(state, ddp_hook)
    for step in range(3):
        x, _ = batch(0, step)
        parallel(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    held = [weakref.ref(x) for x in (parallel, state, *model.parameters(), *gradients)]
    del model, parallel, state, gradients
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


def test_a_second_optimizer_takes_over():
    """Whether the first was collected or not."""
    model = make_model()
    first = distributed(model, "dgc:density=0.05")
    loss_of(model, 0, 0).backward()
    with pytest.raises(hvd.ConfigError, match="under way"):
        distributed(model, "topk")
    first.step()
    second = distributed(model, "topk:density=0.05")
    for step in range(3):
        step_of(model, second, step)
    assert first.compression.step == 1
    assert second.compression.step == 3
    with pytest.raises(hvd.ConfigError, match="taken them over"):
        first.step()
    other = make_model()
    third = distributed(other, "topk:density=0.05")  # of other parameters: both go on
    for optimizer, of in ((second, model), (third, other)):
        step_of(of, optimizer, 0)


def test_backward_passes_on_several_threads():
    """Each on a part of the model, as autograd does for parameters on several devices."""
    parts = [make_model(seed) for seed in range(4)]
    everything = torch.nn.ModuleList(parts)
    optimizer = distributed(everything, "dgc:density=0.05")
    with ThreadPoolExecutor(4) as pool:
        for step in range(20):
            optimizer.zero_grad()
            list(pool.map(lambda part, step=step: loss_of(part, 0, step).backward(), parts))
            optimizer.step()
    expected = torch.nn.ModuleList(make_model(seed) for seed in range(4))
    alone = distributed(expected, "dgc:density=0.05")
    for step in range(20):
        alone.zero_grad()
        for part in expected:
            loss_of(part, 0, step).backward()
        alone.step()
    for p, q in zip(everything.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)


# -- between backward and step ---------------------------------------------------------------


def test_what_cannot_come_between_backward_and_step_says_so():
    model = make_model()
    optimizer = distributed(model, "dgc:density=0.05")
    loss_of(model, 0, 0).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.zero_grad()
    loss_of(model, 0, 1).backward()
    for call in (lambda: optimizer.load_state_dict(saved), optimizer.consolidate_state_dict):
        with pytest.raises(hvd.ConfigError, match=r"call optimizer.step\(\) or"):
            call()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(saved)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_models_zero_grad_does_not_stop_what_is_under_way(method, set_to_none):
    """Other ranks have not called it, perhaps: gradients that were sent arrive."""
    model = make_model()
    optimizer = distributed(model, method)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        if step == 1:
            model.zero_grad(set_to_none)
        told = pytest.warns(UserWarning, match="was changed between backward")
        with told if step == 1 else contextlib.nullcontext():
            optimizer.step()
    assert optimizer.compression.step == 3
    assert all(p.grad is not None for p in model.parameters())


def test_parameters_that_are_added_later_are_taken_over_too():
    first_model, model = make_model(1), make_model(2)
    first = distributed(first_model, "topk:density=0.05")
    second = distributed(model, "topk:density=0.05")
    second.add_param_group({"params": list(first_model.parameters())})
    (loss_of(model, 0, 0) + loss_of(first_model, 0, 0)).backward()
    second.step()
    assert len(second.compression.stats().layers) == 12
    with pytest.raises(hvd.ConfigError, match="taken them over"):
        first.step()


@pytest.mark.parametrize("event", ["nothing", "NaN", "discarded", "loaded", "uneven"])
def test_velocities_of_sums_stay_where_they_are(event):
    """And the numbers are those of steps that are all made anew."""

    def run(anew):
        model = make_model()
        optimizer = distributed(model, "dgc:density=0.05,min_size=1000000")
        if event == "uneven":
            last = optimizer.param_groups[0]["params"].pop()
            optimizer = sgd(model)
            optimizer.param_groups[0]["params"].pop()
            optimizer.add_param_group({"params": [last], "momentum": 0.5})
            named = model.named_parameters()
            method = hvd.DGC(density=0.05, min_size=1000000)
            optimizer = hvd.DistributedOptimizer(optimizer, named, compression=method)
        if event == "discarded":
            optimizer.compression.keep_undo()
        places = []
        for step in range(8):
            if anew:
                optimizer.compression.reducer._plans = {}
            optimizer.zero_grad()
            spoilt = event == "NaN" and step == 4
            (loss_of(model, 0, step) * (float("nan") if spoilt else 1.0)).backward()
            if event == "discarded" and step == 4:
                optimizer.compression.discard()
                continue
            if spoilt:
                optimizer.synchronize()
                optimizer.zero_grad()
                continue
            optimizer.step()
            states = [optimizer.state[p]["compression.velocity"] for p in model.parameters()]
            places.append([x.data_ptr() for x in states])
            if event == "loaded" and step == 4:
                optimizer.load_state_dict(optimizer.state_dict())
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), places

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that a spoilt step is dropped
        found, places = run(False)
        assert torch.equal(found, run(True)[0])
    assert torch.isfinite(found).all()
    if event in ("nothing", "uneven"):
        assert all(place == places[1] for place in places[1:])
