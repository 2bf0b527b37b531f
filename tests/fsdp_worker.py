"""Scenarios of the exchange between replicas of a sharded model, for four ranks on a mesh of 2 x 2;
``torchrun tests/fsdp_worker.py FOLDER`` runs them on every rank."""

from __future__ import annotations

import copy
import itertools
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hvd_compress.torch as hvd
from hvd_compress import Sum, method_names
from hvd_compress.errors import ConfigError, MismatchError, NeedsTuning, UnsupportedError
from hvd_compress.methods import as_compressor
from hvd_compress.torch.process_groups import ReplicaEngine
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
    mesh_of,
    sgd,
    states_of,
    tensors_of,
    train,
)
from tests.in_nodes import gradients_of, lockstep
from tests.scenarios import of_program

STEPS = 4
DGC = "dgc:density=0.05,momentum=0.9,min_size=0"
HALVES = (torch.bfloat16, torch.float16)


#: scenarios that say nothing with this version of PyTorch, and why
LEFT_OUT: dict[str, str] = {}


def _going_on(scenario):
    """For scenarios in which FSDP2 goes on after an exception."""
    if not hasattr(FSDPModule, "reset_iter_state"):
        LEFT_OUT[scenario.__name__] = f"PyTorch {torch.__version__} has no reset_iter_state"
    return scenario


class _Model(torch.nn.Module):
    """Sizes that two ranks cannot divide evenly; of the last bias the second rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(40, 33)
        self.middle = torch.nn.Linear(33, 33)
        self.head = torch.nn.Linear(33, 5)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.head(self.middle(self.inner(x).tanh()).tanh()) * self.scale


def _model():
    torch.manual_seed(0)
    return _Model().to(DEVICE)


def _sharded(mesh, model=None, **options):
    model = model or _model()
    for layer in (model.inner, model.middle, model.head):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _compressed(method, *, policy=None, **options):
    mesh, policies = mesh_of(2, 2), {} if policy is None else {"mp_policy": policy}
    model = _sharded(mesh["shard"], **policies)
    return model, hvd.compress_replicas(model, mesh["replica"], method, **options)


def _loss(model, step):
    return loss_of(model, dist.get_rank(), step)


def _assert_same_in_replicas(model):
    assert_same_everywhere(model, mesh_of(2, 2)["replica"].get_group())


def _in_backward(model, function):
    """Call a function when the gradient comes to the first layer, behind all others."""

    def watch(module, arguments, output):
        output.register_hook(lambda gradient: function())

    return model.inner.register_forward_hook(watch)


def _chunks(x):
    """An array as FSDP2 divides it."""
    middle = (len(x) + 1) // 2
    return [x[:middle], x[middle:]]


def _lockstep(method, momentum=0.0):
    """This rank's parts after training in one process."""
    model = lockstep(method, STEPS, loss_of, momentum, _model(), cut=_chunks)
    place = mesh_of(2, 2)["shard"].get_local_rank()
    return [_chunks(p.detach())[place] for p in model.parameters()]


# -- training ------------------------------------------------------------------------------------


def trains_as_the_lockstep_world() -> None:
    for method in ("none", "topk:density=0.05", "randomk:density=0.1", "onebit:column=16"):
        model, exchange = _compressed(method)
        train(model, range(STEPS))
        _assert_same_in_replicas(model)
        assert_close(model, _lockstep(method))
        record = exchange.stats().layers["inner.weight"]
        shard = model.inner.weight.to_local()
        assert record.steps == STEPS
        assert record.elements == STEPS * shard.numel()
    model, _ = _compressed(DGC)
    train(model, range(STEPS))
    assert_close(model, _lockstep(DGC, momentum=0.9))


def whole_shards_have_the_bits_of_ddp() -> None:
    """Four replicas of one shard are what DistributedDataParallel trains."""
    mesh = mesh_of(4, 1)
    for method in ("topk:density=0.05", DGC, "qsgd"):
        model = _sharded(mesh["shard"])
        hvd.compress_replicas(model, mesh["replica"], method)
        ddp = DistributedDataParallel(_model())
        ddp.register_comm_hook(hvd.DDPState(method, ddp), hvd.ddp_hook)
        losses = [train(each, range(STEPS)) for each in (model, ddp)]
        if method == DGC:  # sums of Gloo depend on the place in the bucket
            assert losses[0] == pytest.approx(losses[1], rel=1e-6)
            assert_close(model, ddp, rtol=1e-5, atol=1e-7)
        else:
            assert losses[0] == losses[1]
            assert_equal(model, ddp)


def every_method_goes_on_from_its_state() -> None:
    """As an uninterrupted run, bit for bit, on every rank; and replicas are equal."""
    refused = set()
    for name in method_names():
        if name.startswith("test-"):
            continue
        options = {"momentum": 0.9} if as_compressor(name).takes_momentum else {}
        try:
            model, exchange = _compressed(name, **options)
        except ConfigError:
            refused.add(name)
            continue
        exchange.set_epoch(0)
        train(model, range(1))
        weights = [x.clone() for x in tensors_of(model)]
        saved = copy.deepcopy(exchange.state_dict())
        train(model, range(1, 2))
        _assert_same_in_replicas(model)
        again, other = _compressed(name, **options)
        for x, y in zip(tensors_of(again), weights, strict=True):
            x.copy_(y)
        other.load_state_dict(saved)
        train(again, range(1, 2))
        assert all(map(torch.equal, tensors_of(again), tensors_of(model))), name
    assert refused == {"onebit_adam", "zero_one_adam"}  # which are optimizers


def _take_nan(model, exchange, clip):
    """Train with a gradient of one rank that is not finite in between."""
    train(model, range(2))
    before = states_of(exchange)
    loss = _loss(model, 2)
    (loss * float("nan") if dist.get_rank() == 0 else loss).backward()
    assert not clip(model).isfinite()  # on every rank, so that all leave the step out
    assert_same_states(states_of(exchange), before)
    model.zero_grad()
    train(model, range(3, 5))


def nan_reaches_every_replica_and_no_state() -> None:
    def clip(model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()

    for method in ("topk:density=0.05", DGC, "powersgd"):
        model, exchange = _compressed(method)
        _take_nan(model, exchange, clip)
        _assert_same_in_replicas(model)
        assert all(x.isfinite().all() for x in tensors_of(model))


def a_discarded_pass_leaves_no_trace() -> None:
    for method in ("topk:density=0.05", "onebit:column=16"):
        assert_no_trace_of_discarded(_compressed, method)


def a_loss_scale_is_refused_where_residuals_wait() -> None:
    model, exchange = _compressed("topk:density=0.05")
    assert_refuses_loss_scale(_loss(model, 0), "topk keeps residuals")
    assert exchange.reducer.step == 0


def clipping_sees_the_averages() -> None:
    native, (model, _) = _sharded(mesh_of(2, 2)), _compressed("none")
    norms = []
    for each in (native, model):
        optimizer = sgd(each)
        for step in range(STEPS):
            optimizer.zero_grad()
            _loss(each, step).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1).full_tensor())
            optimizer.step()
    assert_close(norms[:STEPS], norms[STEPS:])
    assert_close(native, model)


def clipping_before_the_exchange_goes_by_the_gradient_of_the_replica() -> None:
    """Not by that of a shard; ranks that have no elements take part."""
    method = f"{DGC},clip_norm=0.1"
    model, exchange = _compressed(method)
    norm, found = exchange.reducer.store.norm, []
    exchange.reducer.store.norm = lambda x: found.append(norm(x)) or found[-1]
    train(model, range(1))
    mesh = mesh_of(2, 2)
    means = gradients_of(_model(), mesh["replica"].get_local_rank(), 0, loss_of)
    right = torch.nn.utils.get_total_norm(means.values()).item()
    assert found == [pytest.approx(right, rel=1e-5)]

    small = fully_shard(torch.nn.Linear(8, 1, bias=False).to(DEVICE), mesh=mesh["shard"])
    hvd.compress_replicas(small, mesh["replica"], method)
    small(torch.ones(2, 8, device=DEVICE)).sum().backward()
    sgd(small).step()
    assert torch.cat([x.reshape(-1) for x in tensors_of(small)]).isfinite().all()


def gradients_accumulate() -> None:
    """In each of the three ways of FSDP2, as in native HSDP; once with as many exchanges as steps,
    once with as many as passes."""

    def without_sync(model, is_last):
        model.set_requires_gradient_sync(is_last)

    def without_all_reduce(model, is_last):
        model.set_requires_all_reduce(is_last)

    def last_backward(model, is_last):
        model.set_is_last_backward(is_last)

    for announce, passes in ((without_sync, 1), (without_all_reduce, 1), (last_backward, 3)):
        native, (model, exchange) = _sharded(mesh_of(2, 2)), _compressed("none")
        for each in (native, model):
            optimizer = sgd(each)
            for step in range(2):
                optimizer.zero_grad()
                for part in range(3):
                    announce(each, part == 2)
                    _loss(each, 3 * step + part).backward()
                    if each is model and announce is without_all_reduce and part < 2:
                        with pytest.raises(ConfigError, match="between steps"):
                            exchange.state_dict()
                optimizer.step()
        assert_close(native, model)
        assert exchange.reducer.step == 2 * passes


def gradients_of_zero_grad_stay_where_they_are() -> None:
    model, _ = _compressed("topk:density=0.05")
    reference, _ = _compressed("topk:density=0.05")
    optimizer, places = sgd(model), set()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        _loss(model, step).backward()
        optimizer.step()
        places.add(tuple(p.grad.to_local().data_ptr() for p in model.parameters()))
    assert len(places) == 1
    train(reference, range(STEPS))
    assert_equal(model, reference)


def mixed_precision() -> None:
    bf16 = torch.bfloat16
    full = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=torch.float32)
    half = MixedPrecisionPolicy(param_dtype=bf16)
    for policy, size in ((full, 4), (half, 2)):
        native = _sharded(mesh_of(2, 2), mp_policy=policy)
        train(native, range(STEPS))
        model, exchange = _compressed("none", policy=policy)
        train(model, range(STEPS))
        _assert_same_in_replicas(model)
        assert_close(native, model, rtol=1e-2, atol=1e-3)
        total = exchange.stats().total
        # From 2.15 on, PyTorch reduces in the parameters' own dtype unless it is told another one.
        version = tuple(map(int, torch.__version__.split(".")[:2]))
        arrived = 4 if version >= (2, 15) else size
        assert total.bytes_sent == arrived * total.elements
        for method in ("topk:density=0.05", "powersgd"):
            model, exchange = _compressed(method, policy=policy)
            train(model, range(2))
            exchange.load_state_dict(exchange.state_dict())
            train(model, range(2, STEPS))
            _assert_same_in_replicas(model)
            assert model.inner.weight.grad.dtype == torch.float32
            if method == "topk:density=0.05":
                assert states_of(exchange)["inner.weight"]["residual"].dtype == torch.float32
    fp16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)  # which FSDP2 divides twice
    native = _sharded(mesh_of(2, 2), mp_policy=fp16)
    model, _ = _compressed("none", policy=fp16)
    for each in (native, model):
        train(each, range(STEPS))
    assert_close(native, model, rtol=1e-2, atol=1e-3)


def a_divide_factor_counts_as_in_native_hsdp() -> None:
    """Set before and after ``compress_replicas``, for the whole model or a part, between steps."""
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policies = (None, wide, *(MixedPrecisionPolicy(reduce_dtype=d) for d in HALVES))

    def divide(model, factor):
        model.inner.set_gradient_divide_factor(factor)
        model.head.set_reduce_scatter_divide_factor(2 * factor)
        model.set_gradient_divide_factor(1.0)  # FSDP2's calls are for one module each

    def gradients(model, step):
        model.zero_grad()
        _loss(model, step).backward()
        return tensors_of(p.grad for p in model.parameters())

    for policy, forced in itertools.product(policies, (True, False)):
        options = {} if policy is None else {"mp_policy": policy}
        is_fp16 = getattr(policy, "reduce_dtype", None) == torch.float16
        if not forced and not is_fp16 and DEVICE.type == "cpu":
            continue  # Gloo cannot multiply before it adds
        native, mesh = _sharded(mesh_of(2, 2), **options), mesh_of(2, 2)
        model = _sharded(mesh["shard"], **options)
        for each in (native, model):
            each.inner.set_gradient_divide_factor(4.0)
            for module in (each, each.inner, each.middle, each.head):
                module.set_force_sum_reduction_for_comms(forced)
        hvd.compress_replicas(model, mesh["replica"], "none")
        tolerances = {} if policy is None else {"rtol": 2e-2, "atol": 1e-3}
        for step, factor in enumerate((None, 4.0, 2.0, 3.0)):
            if factor is not None:
                divide(native, factor)
                divide(model, factor)
            assert_close(gradients(model, step), gradients(native, step), **tolerances)


def half_precisions_are_added_in_float32() -> None:
    """1 + three times 2^-9 is lost in bfloat16, one by one."""

    def added(x):
        return (yield Sum(x, wire=str(x.dtype).removeprefix("torch.")))

    engine = ReplicaEngine(dist.group.WORLD, torch.device("cpu"))
    x = torch.full((7,), 1.0 if dist.get_rank() == 0 else 2**-9)
    for dtype in (torch.bfloat16, torch.float16):
        engine.start("x", added(x.to(dtype)))
        assert torch.equal(engine.finish()["x"], torch.full((7,), 1 + 3 * 2**-9).to(dtype))


def starts_during_backward() -> None:
    """The last layer's exchange is under way when the first layer's gradient is computed."""
    model, exchange = _compressed("topk:density=0.05")
    train(model, range(2))
    seen = []
    _in_backward(model, lambda: seen.append([module.name for module in exchange._begun]))
    train(model, range(2, 3))
    assert seen == [["head", "middle"]]
    assert not exchange._begun


# -- the model -----------------------------------------------------------------------------------


def replicas_begin_alike() -> None:
    mesh = mesh_of(2, 2)
    torch.manual_seed(mesh["replica"].get_local_rank())
    model = _sharded(mesh["shard"], _Model())
    hvd.compress_replicas(model, mesh["replica"], "topk")
    _assert_same_in_replicas(model)


def frozen_parameters() -> None:
    model, exchange = _compressed("topk:density=0.05")
    model.inner.requires_grad_(False)
    model.head.weight.requires_grad_(False)
    train(model, range(2))
    assert set(exchange.state_dict()[f"rank {dist.get_rank()}"]["states"]) <= {
        "middle.weight",
        "middle.bias",
        "head.bias",
        "scale",
    }
    model.requires_grad_(True)
    train(model, range(2, 4))
    _assert_same_in_replicas(model)
    model.inner.requires_grad_(False)  # whose state stays
    exchange.load_state_dict(exchange.state_dict())
    train(model, range(4, 5))


def _partly_used():
    class Half(_Model):
        def forward(self, x):
            return self.head(self.inner(x).tanh()) * self.head.weight.sum()

    mesh = mesh_of(2, 2)
    part = fully_shard(Half(), mesh=mesh["shard"])
    hvd.compress_replicas(part, mesh["replica"], "topk:density=0.05")
    with pytest.raises(UnsupportedError, match="set_reduce_scatter_unused_params"):
        train(part, range(1))
    return part


def unused_parameters_are_refused() -> None:
    _partly_used()


@_going_on
def unused_parameters_that_fsdp_reduces() -> None:
    part = _partly_used()
    part.reset_iter_state()
    part.set_reduce_scatter_unused_params(True)
    train(part, range(2))
    _assert_same_in_replicas(part)


class _Twice(_Model):
    """A module is used twice."""

    def forward(self, x):
        x = self.middle(self.inner(x).tanh()).tanh()
        return self.head(self.middle(x).tanh()) * self.scale


class _Again(_Model):
    """Activations are computed again."""

    reentrant = False

    def forward(self, x):
        x = self.inner(x).tanh()
        x = checkpoint(self.middle, x, use_reentrant=self.reentrant).tanh()
        return checkpoint(self.head, x, use_reentrant=self.reentrant) * self.scale


class _Reentrant(_Again):
    reentrant = True


def _together(mesh, model):
    """Modules are sharded together."""
    fully_shard([model.inner, model.middle], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def models_of_all_kinds_train_as_in_native_hsdp() -> None:
    mesh = mesh_of(2, 2)
    kinds = (_Model, _sharded), (_Model, _together), (_Twice, _sharded)
    for cls, shard in (*kinds, (_Again, _sharded), (_Reentrant, _sharded)):
        models = []
        for shape in (mesh, mesh["shard"]):
            torch.manual_seed(0)
            models.append(shard(shape, cls().to(DEVICE)))
        exchange = hvd.compress_replicas(models[1], mesh["replica"], "none")
        losses = [train(each, range(STEPS), sgd(each, momentum=0.9)) for each in models]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert_close(models[0], models[1], rtol=1e-6, atol=1e-7)
        assert exchange.stats().total.ratio == 1
        assert not exchange._begun


def _failed_in_backward(model):
    """Train two steps, and fail in the middle of the third."""

    def fail():
        raise RuntimeError("in the middle")

    train(model, range(2))
    handle = _in_backward(model, fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        train(model, range(2, 3))
    handle.remove()


def an_exception_in_the_middle_of_backward_enters_no_state() -> None:
    (model, exchange), (twin, its_exchange) = (_compressed("topk:density=0.05") for _ in range(2))
    train(twin, range(2))
    _failed_in_backward(model)
    assert exchange._begun, "some were on their way"
    assert_same_states(states_of(exchange), states_of(its_exchange))


@_going_on
def an_exception_in_the_middle_of_backward_ends_one_step() -> None:
    """Gradients of the root, which FSDP2 itself keeps, are as in native HSDP."""
    native, (model, _) = _sharded(mesh_of(2, 2)), _compressed("none")
    biased, _ = _compressed("topk:density=0.05")
    for each in (native, model, biased):
        _failed_in_backward(each)
        each.reset_iter_state()
        train(each, range(3, 5))
    assert_close(native, model)
    _assert_same_in_replicas(biased)


# -- checkpoints ---------------------------------------------------------------------------------


class _Saved:
    """Model and optimizer, as PyTorch's tutorial has them."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def distributed_checkpoints_resume_bit_for_bit() -> None:
    folder = from_rank_0(tempfile.mkdtemp() if dist.get_rank() == 0 else None)
    for number, method in enumerate(("topk:density=0.05", DGC, "powersgd", "none")):
        momentum = 0.0 if method == DGC else 0.9

        def fresh(method=method, momentum=momentum):
            model, exchange = _compressed(method)
            optimizer = sgd(model, momentum)
            saved = _Saved(model, optimizer)
            return model, optimizer, exchange, {"training": saved, "exchange": exchange}

        model, optimizer, exchange, everything = fresh()
        train(model, range(3), optimizer)
        path = str(Path(folder) / str(number))
        dcp.save(everything, checkpoint_id=path)
        train(model, range(3, 6), optimizer)

        again, its_optimizer, other, everything = fresh()
        for x in tensors_of(again):
            x.zero_()
        dcp.load(everything, checkpoint_id=path)
        assert other.reducer.step == 3
        train(again, range(3, 6), its_optimizer)
        assert_equal(again, model)
        assert_same_states(states_of(other), states_of(exchange))


def states_of_others_are_refused() -> None:
    model, exchange = _compressed("topk:density=0.05")
    train(model, range(2))
    own, (rest,) = f"rank {dist.get_rank()}", exchange.state_dict().values()
    with pytest.raises(ConfigError, match=r"it has rank 9, and this is rank \d"):
        exchange.load_state_dict({"rank 9": rest})
    with pytest.raises(ConfigError, match="'other', which the model has not"):
        exchange.load_state_dict({own: {**rest, "states": {**rest["states"], "other": {}}}})
    with pytest.raises(ConfigError, match="not everything was loaded: take a step before"):
        exchange.load_state_dict({own: {**rest, "states": {}}})
    with pytest.raises(ConfigError, match="'about' is damaged"):
        exchange.load_state_dict({own: {**rest, "about": "{}"}})
    _, other = _compressed("none")
    with pytest.raises(ConfigError, match="it is of topk, and the method here is none"):
        other.load_state_dict({own: rest})


# -- mistakes ------------------------------------------------------------------------------------


def mistakes_are_errors() -> None:
    mesh = mesh_of(2, 2)
    replica, shard = mesh["replica"], mesh["shard"]
    model, _ = _compressed("topk")
    for words, its, among, method, options in (
        ("fully_shard was not called", _model(), replica, "topk", {}),
        ("both dimensions of the mesh", _sharded(mesh), replica, "topk", {}),
        ("among ranks 0, 1, 2, 3, and ranks", _sharded(mesh_of(4)), replica, "topk", {}),
        ("divided among ranks", _sharded(shard), shard, "topk", {}),
        ("one replica only", _sharded(shard), mesh_of(4, 1)["shard"], "topk", {}),
        ("has 2 dimensions", _sharded(shard), mesh, "topk", {}),
        ("as a mesh", _sharded(shard), 2, "topk", {}),
        ("give the optimizer momentum=0", _sharded(shard), replica, "dgc", {}),
        ("leaves momentum to the opt", _sharded(shard), replica, "topk", {"momentum": 0.9}),
        ("call compress_replicas once", model, replica, "topk", {}),
    ):
        with pytest.raises(ConfigError, match=words):
            hvd.compress_replicas(its, among, method, **options)
    model.inner.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UnsupportedError, match="step after loss"):
        train(model, range(1))


def models_of_fsdp1_are_told_to_use_fully_shard() -> None:
    shard, replica = mesh_of(2, 2)["shard"], mesh_of(2, 2)["replica"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that FSDP2 has come
        model = FullyShardedDataParallel(
            _model(), device_mesh=shard, device_id=DEVICE, use_orig_params=True
        )
    with pytest.raises(UnsupportedError, match=r"FSDP1.*fully_shard\(module, mesh=mesh"):
        hvd.compress_replicas(model, replica, "topk")
    for method in (hvd.DiLoCo, hvd.LocalSGD):
        with pytest.raises(UnsupportedError, match=r"left this rank a part.*Write fully_shard"):
            hvd.DistributedOptimizer(sgd(model), method=method, process_set=replica)


def all_ranks_learn_that_one_differs() -> None:
    method = "topk:density=0.05" if dist.get_rank() != 3 else "topk:density=0.01"
    with pytest.raises(MismatchError, match=r"rank 0, 1, 2: TopK.*\n.*rank 3: TopK"):
        _compressed(method)
    with pytest.raises(MismatchError, match="seed"):
        _compressed("topk", seed=dist.get_rank() % 2)
    model, exchange = _compressed("topk:density=0.05")
    exchange.set_epoch(dist.get_rank() // 2)
    with pytest.raises(MismatchError, match="epoch"):
        train(model, range(1))


# -- local steps between replicas ----------------------------------------------------------------


def local_steps_between_replicas() -> None:
    """Replicas train alone and meet; parts of the model that a rank has not are none of its
    business."""
    replica = mesh_of(2, 2)["replica"]
    for make in (
        lambda o: hvd.DistributedOptimizer(
            o, method=hvd.DiLoCo(sync_every=2, compression="topk:density=0.1"), process_set=replica
        ),
        lambda o: hvd.DistributedOptimizer(
            o, method=hvd.LocalSGD(sync_every=2), process_set=replica.get_group()
        ),
        lambda o: hvd.DistributedOptimizer(o, method=hvd.EASGD(sync_every=2), process_set=replica),
    ):
        model = _sharded(mesh_of(2, 2)["shard"])
        optimizer = make(sgd(model, momentum=0.9))
        train(model, range(STEPS), optimizer)
        saved = copy.deepcopy(optimizer.state_dict())
        weights = [x.clone() for x in tensors_of(model)]
        train(model, range(STEPS, STEPS + 3), optimizer)
        again = _sharded(mesh_of(2, 2)["shard"])
        for x, y in zip(tensors_of(again), weights, strict=True):
            x.copy_(y)
        other = make(sgd(again, momentum=0.9))
        other.load_state_dict(saved)
        train(again, range(STEPS, STEPS + 3), other)
        assert_equal(again, model)
        with optimizer.synchronized_parameters():
            _assert_same_in_replicas(model)
        assert_equal(again, model)


def local_sgd_of_one_step_is_native_hsdp() -> None:
    native, model = (_sharded(mesh) for mesh in (mesh_of(2, 2), mesh_of(2, 2)["shard"]))
    optimizer = hvd.DistributedOptimizer(
        sgd(model), method=hvd.LocalSGD(sync_every=1), process_set=mesh_of(2, 2)["replica"]
    )
    train(native, range(STEPS))
    train(model, range(STEPS), optimizer)
    assert_close(native, model)


def optimizers_of_shards_say_what_works() -> None:
    shard = mesh_of(2, 2)["shard"]
    with pytest.raises(ConfigError, match="divided among ranks"):
        hvd.DistributedOptimizer(sgd(_sharded(shard)), method=hvd.DiLoCo(), process_set=shard)
    with pytest.raises(ConfigError, match="divided among ranks"):
        hvd.DistributedOptimizer(
            sgd(_sharded(mesh_of(2, 2))), method=hvd.DiLoCo(), process_set=mesh_of(2, 2)["replica"]
        )


def the_hook_of_ddp_serves_tensor_parallel_models() -> None:
    """Each rank exchanges its shards with the ranks that have the same."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("replica", "parallel"))
    group = mesh.get_group("replica")
    torch.manual_seed(0)
    layers = torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)
    model = torch.nn.Sequential(*layers).to(DEVICE)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    _pre_dp_module_transform(parallelize_module(model, mesh["parallel"], plan))
    shards = dict(model.named_parameters())  # in forward they are others
    before = {name: p.detach().clone() for name, p in shards.items()}
    model = DistributedDataParallel(model, process_group=group)
    state = hvd.DDPState("topk:density=0.05", model, process_group=group)
    model.register_comm_hook(state, hvd.ddp_hook)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(group), step).backward()
        optimizer.step()
    assert state.stats().total.ratio > 8
    assert shards["0.weight"].shape == (32, 40)
    for name, p in shards.items():
        theirs = [torch.empty_like(p) for _ in range(2)]
        dist.all_gather(theirs, p.detach(), group=group)
        assert torch.equal(*theirs)
        assert not torch.equal(p, before[name])


def _begin() -> None:
    warnings.filterwarnings("ignore", category=NeedsTuning)


SCENARIOS = of_program(globals())

if __name__ == "__main__":
    from tests import fsdp_worker as own  # the module that other scenarios import

    scenarios = {name: f for name, f in own.SCENARIOS.items() if name not in own.LEFT_OUT}
    group_worker.main(scenarios, own._begin, (DeprecationWarning, FutureWarning))
