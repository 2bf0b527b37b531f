"""Scenarios of FSDP1, which ``fsdp_worker.py`` runs beside its own."""

from __future__ import annotations

import copy
import gc
import tempfile
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

import hvd_compress.torch as hvd
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.methods import as_compressor
from hvd_compress.torch.plain import check_plain
from tests.devices import DEVICE
from tests.fsdp_worker import (
    DGC,
    LR,
    MESHES,
    STEPS,
    _assert_close,
    _assert_equal,
    _loss,
    _model,
    _sgd,
    _states,
    _take_nan,
    _train,
)
from tests.scenarios import of_program

FULL, HYBRID = ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD


def _wrapped(mesh, strategy=FULL, model=None, use_orig_params=True, **options):
    """Every layer is a unit; the rest is the model's own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 says that FSDP2 has come
        return FullyShardedDataParallel(
            model or _model(),
            device_mesh=mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
            device_id=DEVICE,
            use_orig_params=use_orig_params,
            **options,
        )


def _flat_pair(method, strategy=FULL, *, momentum=None, **options):
    mesh = MESHES["2x2"]
    model = _wrapped(mesh["shard"], strategy, **options)
    return model, hvd.compress_replicas(model, mesh["replica"], method, momentum=momentum)


def _whole(model):
    """The parameters as one process has them."""
    with FullyShardedDataParallel.summon_full_params(model):
        whole = {clean_tensor_name(n): p.detach().clone() for n, p in model.named_parameters()}
    return [whole[name] for name, _ in _model().named_parameters() if name in whole]


def _shards(model):
    return [unit._handle.flat_param for unit in FullyShardedDataParallel.fsdp_modules(model)]


def _equal_in_replicas(model):
    mine = torch.cat([x.detach().reshape(-1) for x in _shards(model)])
    group = MESHES["2x2"]["replica"].get_group()
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    assert all(torch.equal(theirs, mine) for theirs in everyones)


def _in_one_process(method, momentum, alignment):
    """The parameters after training in one process: the mean gradient of a replica is laid out
    flat, unit by unit, and each half meets the other replica's, parameter by parameter."""
    model, replicas = _model(), MESHES["2x2"].mesh.tolist()
    layers = [list(layer.parameters()) for layer in (model.inner, model.middle, model.head)]
    names = {id(p): name for name, p in model.named_parameters()}
    worlds = [World(as_compressor(method), 2) for _ in range(2)]
    for step in range(STEPS):
        means = []
        for ranks in replicas:
            model.zero_grad()
            (sum(_loss(model, step, rank) for rank in ranks) / len(ranks)).backward()
            means.append({id(p): p.grad.reshape(-1).clone() for p in model.parameters()})
        for unit in [[model.scale], *layers]:
            begins, end = [], 0
            for p in unit:
                begins.append(-(-end // alignment) * alignment)
                end = begins[-1] + p.numel()
            for begin, p in zip(begins, unit, strict=True):
                cut = min(max(-(-end // 2) - begin, 0), p.numel())
                for world, part in zip(worlds, (slice(0, cut), slice(cut, None)), strict=True):
                    pieces = [mean[id(p)][part] for mean in means]
                    if pieces[0].numel():
                        found = world.exchange(pieces, name=names[id(p)], momentum=momentum)
                        with torch.no_grad():
                            p.view(-1)[part].sub_(found[0].direction, alpha=LR)
    return [p.detach() for p in model.parameters()]


def flat_shards_train_as_the_lockstep_world() -> None:
    for method in ("none", "topk:density=0.05", "onebit:column=16", DGC):
        momentum = 0.9 if method == DGC else 0.0
        for strategy, orig in ((FULL, True), (ShardingStrategy.SHARD_GRAD_OP, False)):
            model, exchange = _flat_pair(method, strategy, use_orig_params=orig)
            _train(model, range(STEPS))
            _equal_in_replicas(model)
            # With the original parameters each begins at a multiple of 16 bytes.
            _assert_close(_whole(model), _in_one_process(method, momentum, 4 if orig else 1))
            record = exchange.stats().layers["inner.weight"]
            assert record.steps == STEPS
            assert set(exchange.stats().layers) <= set(dict(_model().named_parameters()))


def flat_dense_is_native_hsdp() -> None:
    native, (model, exchange) = _wrapped(MESHES["2x2"], HYBRID), _flat_pair("none")
    losses = [_train(each, range(STEPS), _sgd(each, momentum=0.9)) for each in (native, model)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    _assert_close(_whole(native), _whole(model), rtol=1e-6, atol=1e-7)
    assert exchange.stats().total.ratio == 1


def flat_divide_factors_count_as_in_native_hsdp() -> None:
    native, (model, _) = _wrapped(MESHES["2x2"], HYBRID), _flat_pair("none")
    for step, factors in enumerate(((None, None), (1.0, 1.0), (2.0, 3.0), (2.0, 2.0))):
        for each in (native, model):
            for unit in FullyShardedDataParallel.fsdp_modules(each) if factors[0] else ():
                unit._gradient_predivide_factor, unit._gradient_postdivide_factor = factors
            each.zero_grad()
            _loss(each, step).backward()
        units = [FullyShardedDataParallel.fsdp_modules(each) for each in (model, native)]
        _assert_close(*([unit._handle.sharded_grad for unit in each] for each in units))


def flat_shards_go_on_from_their_state() -> None:
    for method in ("topk:density=0.05", DGC, "fp8", "onebit:column=16", "ef21:density=0.1"):
        model, exchange = _flat_pair(method)
        _train(model, range(2))
        weights = [x.detach().clone() for x in _shards(model)]
        saved = copy.deepcopy(exchange.state_dict())
        _train(model, range(2, 4))
        _equal_in_replicas(model)
        again, other = _flat_pair(method)
        for x, y in zip(_shards(again), weights, strict=True):
            x.data.copy_(y)
        other.load_state_dict(saved)
        _train(again, range(2, 4))
        assert all(map(torch.equal, _shards(again), _shards(model))), method


def flat_gradients_accumulate() -> None:
    """With ``no_sync`` once a step, without it in each pass, and into gradients that are kept."""
    for passes, to_none in ((1, True), (3, True), (3, False)):
        native, (model, exchange) = _wrapped(MESHES["2x2"], HYBRID), _flat_pair("none")
        for each in (native, model):
            optimizer = _sgd(each)
            for step in range(2):
                optimizer.zero_grad(set_to_none=to_none)
                for part in range(3):
                    if passes == 1 and part < 2:
                        with each.no_sync():
                            _loss(each, 3 * step + part).backward()
                    else:
                        _loss(each, 3 * step + part).backward()
                optimizer.step()
        _assert_close(_whole(native), _whole(model))
        assert exchange.reducer.step == 2 * passes


def flat_shards_clip_and_survive_nan() -> None:
    native, (model, exchange) = _wrapped(MESHES["2x2"], HYBRID), _flat_pair("none")
    for each in (native, model):
        optimizer = _sgd(each)
        for step in range(2):
            optimizer.zero_grad()
            _loss(each, step).backward()
            each.clip_grad_norm_(0.1)
            optimizer.step()
    _assert_close(_whole(native), _whole(model))
    for method in ("topk:density=0.05", DGC):
        model, exchange = _flat_pair(method)
        _take_nan(model, exchange, lambda model: model.clip_grad_norm_(1.0))
        _equal_in_replicas(model)
        assert all(x.isfinite().all() for x in _whole(model))


def flat_shards_of_mixed_precision() -> None:
    bf16, fp16 = torch.bfloat16, torch.float16
    for policy, size in (
        (MixedPrecision(param_dtype=bf16, reduce_dtype=torch.float32), 4),
        (MixedPrecision(param_dtype=bf16), 2),
        (MixedPrecision(reduce_dtype=fp16), 2),
    ):
        native = _wrapped(MESHES["2x2"], HYBRID, mixed_precision=policy)
        _train(native, range(STEPS))
        model, exchange = _flat_pair("none", mixed_precision=policy)
        _train(model, range(STEPS))
        _equal_in_replicas(model)
        _assert_close(_whole(native), _whole(model), rtol=1e-2, atol=1e-3)
        total = exchange.stats().total
        assert total.bytes_sent == size * total.elements
        for method in ("topk:density=0.05", DGC):
            model, _ = _flat_pair(method, mixed_precision=policy)
            _train(model, range(STEPS))
            _equal_in_replicas(model)


def flat_parameters_that_are_frozen_or_unused() -> None:
    model, exchange = _flat_pair("topk:density=0.05", model=None)
    model.inner.requires_grad_(False)
    before = [x.detach().clone() for x in _shards(model.inner)]
    _train(model, range(2))
    _assert_equal([x.detach() for x in _shards(model.inner)], before)
    assert not any(name.startswith("inner") for name, _ in _states(exchange))
    model.requires_grad_(True)
    _train(model, range(2, 4))
    _equal_in_replicas(model)

    class Half(type(_model())):
        def forward(self, x):
            return self.head(self.inner(x).tanh()) * self.scale

    part, exchange = _flat_pair("topk:density=0.05", model=Half())
    _train(part, range(3))
    _equal_in_replicas(part)
    assert exchange.stats().layers["inner.weight"].steps == 3


def flat_checkpoints_resume_bit_for_bit() -> None:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    model, exchange = _flat_pair("topk:density=0.05")
    _train(model, range(3))
    weights = [x.detach().clone() for x in _shards(model)]
    path = str(Path(folders[0]) / "flat")
    dcp.save({"exchange": exchange}, checkpoint_id=path)
    _train(model, range(3, 6))
    again, other = _flat_pair("topk:density=0.05")
    for x, y in zip(_shards(again), weights, strict=True):
        x.data.copy_(y)
    dcp.load({"exchange": other}, checkpoint_id=path)
    _train(again, range(3, 6))
    assert all(map(torch.equal, _shards(again), _shards(model)))
    mine, theirs = _states(exchange), _states(other)
    assert mine.keys() == theirs.keys()
    for key, x in mine.items():
        assert torch.equal(theirs[key], x), key


def activations_of_flat_shards_may_be_computed_again() -> None:
    class Again(type(_model())):
        reentrant = False

        def forward(self, x):
            x = self.inner(x).tanh()
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant).tanh()
            return checkpoint(self.head, x, use_reentrant=self.reentrant) * self.scale

    for Again.reentrant in (False, True):
        torch.manual_seed(0)
        native = _wrapped(MESHES["2x2"], HYBRID, model=Again())
        torch.manual_seed(0)
        model, exchange = _flat_pair("none", model=Again())
        for each in (native, model):
            _train(each, range(3))
        _assert_close(_whole(native), _whole(model))
        assert not exchange._begun


def a_flat_module_may_be_used_twice() -> None:
    class Twice(type(_model())):
        def forward(self, x):
            x = self.middle(self.inner(x).tanh()).tanh()
            return self.head(self.middle(x).tanh()) * self.scale

    torch.manual_seed(0)
    native = _wrapped(MESHES["2x2"], HYBRID, model=Twice())
    torch.manual_seed(0)
    model, exchange = _flat_pair("none", model=Twice())
    for each in (native, model):
        _train(each, range(3))
    _assert_close(_whole(native), _whole(model))
    # Nothing of PyTorch or of this process keeps them.
    kept = [weakref.ref(x) for x in (model, exchange, exchange.reducer, *_shards(model))]
    del each, model, exchange
    gc.collect()
    assert not [x for each in kept if (x := each()) is not None]


def flat_shards_take_local_steps_between_replicas() -> None:
    replica = MESHES["2x2"]["replica"]
    for orig in (True, False):
        native = _wrapped(MESHES["2x2"], HYBRID, use_orig_params=orig)
        model = _wrapped(MESHES["2x2"]["shard"], use_orig_params=orig)
        _train(native, range(STEPS))
        _train(model, range(STEPS), hvd.LocalSGD(_sgd(model), sync_every=1, process_set=replica))
        _assert_close(_whole(native), _whole(model))
        method = hvd.DiLoCo(
            _sgd(model, 0.9), sync_every=2, process_set=replica, compression="topk:density=0.1"
        )
        _train(model, range(STEPS), method)
        with method.synchronized_parameters():
            _equal_in_replicas(model)


def mistakes_with_flat_shards_are_errors() -> None:
    mesh, compress = MESHES["2x2"], hvd.compress_replicas
    shard, replica = mesh["shard"], mesh["replica"]
    with pytest.raises(ConfigError, match="strategy HYBRID_SHARD, in which"):
        compress(_wrapped(mesh, HYBRID), replica, "topk")
    with pytest.raises(ConfigError, match=r"NO_SHARD.*belongs into DistributedDataParallel"):
        compress(_wrapped(shard, ShardingStrategy.NO_SHARD), replica, "topk")
    with pytest.raises(ConfigError, match="divided among ranks"):
        compress(_wrapped(shard), shard, "topk")
    with pytest.raises(ConfigError, match="shard with fully_shard, or take another"):
        compress(_wrapped(shard), replica, "powersgd")
    offloaded = _wrapped(shard, cpu_offload=CPUOffload(offload_params=True))
    with pytest.raises(UnsupportedError, match="cpu_offload"):
        compress(offloaded, replica, "topk")
    mixed = torch.nn.Sequential(_wrapped(shard), fully_shard(torch.nn.Linear(3, 3), mesh=shard))
    with pytest.raises(UnsupportedError, match="use one of them"):
        compress(mixed, replica, "topk")
    for orig in (True, False):
        model = _wrapped(shard, use_orig_params=orig)
        for p in model.parameters():
            with pytest.raises(UnsupportedError, match="has left this rank a part"):
                check_plain(p)
    # Not at the top: its import warns of something deprecated in PyTorch's own.
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = _model()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    model, _ = _flat_pair("topk", model=model)
    with pytest.raises(UnsupportedError, match="step after loss"):
        _loss(model, 0).backward()
    model, _ = _flat_pair("topk")
    with pytest.raises(ConfigError, match="a communication hook already"):
        compress(model, replica, "topk")
    with pytest.raises(MismatchError, match="seed"):
        compress(_wrapped(shard), replica, "topk", seed=dist.get_rank() % 2)


SCENARIOS = of_program(globals())
