"""Compressed collectives for a model that FSDP2 divides among ranks.

``fully_shard`` gathers the parameters of a module before it is used, and sums up its gradients, a
shard on each rank.  PyTorch lets both be replaced, by ``FSDPModule.set_custom_reduce_scatter`` and
``set_custom_all_gather``; the objects that stand there are in :mod:`.shard_collectives`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.agreement import listed
from hvd_compress.base import Compressor
from hvd_compress.codecs import Codec, float8, linear
from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.methods import BF16, FP8, FP16, LinearQuantization, NoCompression
from hvd_compress.methods.texts import as_fixed
from hvd_compress.reduce.state_file import entry, refused, whole
from hvd_compress.stats import Stats

from ..amp import NO_SCALE, refuse_scale, running_scale
from ..lost_ranks import meet
from ..parameters import is_sharded
from ..replicas import agree, group_of
from .fsdp import ShardedParameter, groups_of, names_of, sharded_modules, trained_of
from .nodes import NodeGroups, check_nodes, nodes_of, text_of
from .shard_collectives import AllGather, ReduceScatter, Way

#: how to shard a model for compressed shards
HOW = "call fully_shard for each layer and for the model, then hvd.compress_shards(model, 'linear')"
_VERSION = 1
_Exempt = Callable[[str, torch.nn.Parameter], bool]


class ShardExchange:
    """The result of :func:`compress_shards`: statistics, and what waits, for checkpoints.

    Attributes:
        method: of gradients.
    """

    def __init__(
        self,
        method: Compressor,
        gradients: list[ReduceScatter],
        parameters: list[AllGather],
        replicas: Any,
    ) -> None:
        self.method, self._replicas = method, replicas
        self._gradients, self._parameters = gradients, parameters

    def stats(self) -> Stats:
        """Return the exact bytes so far that this rank has sent to others and got from them.  The
        norms of the errors that wait are there, too, by parameter and in total.

        Dense bytes are those that FSDP2 would have sent.  With compressed parameters "NAME,
        gathered" counts these.
        """
        found = {}
        for each in self._gradients:
            norms = each.norms()
            for name, record in each.records.items():
                record.residual_norm = norms.get(name, 0.0)
                found[name] = record
        for gathered in self._parameters:
            found |= {f"{name}, gathered": x for name, x in gathered.records.items()}
        return Stats({name: record for name, record in found.items() if record.steps})

    def reset_stats(self) -> None:
        """Begin at zero with all that :meth:`stats` counts."""
        for each in (*self._gradients, *self._parameters):
            each.records = {name: type(record)() for name, record in each.records.items()}

    def forget_parameters(self) -> None:
        """Let the next forward pass gather parameters as they are: after something else than the
        optimizer has changed them.  On all ranks; ``model.load_state_dict`` does it by itself.

        Raises:
            CollectiveTimeout: other ranks do not call it in the time-out of the job.
        """
        self._forget("forget_parameters()")

    def _forget(self, call: str) -> None:
        if any(each.is_under_way for each in self._parameters):
            meet(self._parameters[0].ranks, call)
        for each in self._parameters:
            each.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what waits, as averages over the ranks, divided as the parameters are (``DTensor``
        of float32): any number of ranks can load it.  A collective of all ranks.

        It is for ``torch.distributed.checkpoint``, which takes this object beside model and
        optimizer.
        """
        waiting: dict[str, Any] = {}
        for each in self._gradients:
            parts = {part.name: part for part in each.parts}
            for name, flat in each.waiting().items():
                # Those over which PyTorch's own HSDP averages, if it does, come second.
                own = getattr(each.of.mesh_info, "replicate_process_group", None)
                for group in (self._replicas, own):
                    if group is not None:
                        dist.all_reduce(flat, group=group)
                        flat.div_(dist.get_world_size(group))
                of = parts[name].of
                strided = flat.as_strided(of.sharded_size, of.contiguous_sharded_stride)
                waiting[name] = of.to_sharded_dtensor(strided.clone())
        step = max((each.step for each in self._gradients), default=0)
        about = {"version": _VERSION, "step": step, "names": sorted(waiting)}
        return {"about": json.dumps(about), "waiting": waiting}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with what :meth:`state_dict` has returned, on as many ranks or others: what waited
        is added to the averages of the next step.  On all ranks.

        Raises:
            ConfigError: it belongs to another model or is damaged; then nothing has changed.
            CollectiveTimeout: other ranks do not load it in the time-out of the job, or refuse it;
                then nothing has changed either.
        """
        try:
            about = json.loads(entry(state_dict, "about", str))
        except ValueError as error:
            raise refused(f"its text 'about' is damaged: {error!r}") from error
        if (version := whole(about, "version")) != _VERSION:
            raise refused(f"it has version {version}, and this package reads {_VERSION}")
        step, names = whole(about, "step"), set(entry(about, "names", list))
        # Without a parameter that waits DCP leaves the entry out.
        waiting = entry(state_dict, "waiting", Mapping) if names else {}
        here = {part.name: part for each in self._gradients for part in trained_of(each.parts)}
        coded = {name for each in self._gradients for name in each.names()}
        if unknown := names - coded:
            raise refused(
                f"it has what waits of {min(unknown)!r}, and here nothing waits of it: load it "
                "with the model that saved it, and with a method that keeps a residual"
            )
        if missing := names ^ set(waiting):
            raise refused(f"what waits of {min(missing)!r} was not loaded with it")
        local = {}
        for name, x in waiting.items():
            if not is_sharded(x):
                raise refused(f"what waits of {name!r} is no DTensor, as that of state_dict() is")
            expected = here[name].of.sharded_param
            if (x.shape, x.placements) != (expected.shape, expected.placements):
                raise refused(
                    f"what waits of {name!r} has the shape {tuple(x.shape)} in {x.placements}, and "
                    f"the parameter {tuple(expected.shape)} in {expected.placements}"
                )
            local[name] = x.to_local().float()
            if not local[name].isfinite().all():
                raise refused(f"what waits of {name!r} is not finite")
        meet(self._gradients[0].ranks, "load_state_dict() of the exchange")
        for each in self._gradients:
            own = {name: local[name] for name in each.names() if name in local}
            each.resume(own, step)
        for gathered in self._parameters:
            gathered.forget()


def compress_shards(
    model: torch.nn.Module,
    compression: Any,
    *,
    parameters: Any = None,
    exempt: _Exempt | None = None,
    residual: str | None = "int8",
    beta: float = 0.8,
    reset_every: int | None = 1024,
    nodes: Any = None,
    inside: Any = "linear",
    replicas: Any = None,
) -> ShardExchange:
    """Compress the collectives of a model that ``fully_shard`` (FSDP2) divides among ranks.

    A collective of all ranks, after the last ``fully_shard`` and before the first step::

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        exchange = hvd.compress_shards(model, "linear:bits=4")

    A rank sends every other the code of its shard of the gradients, and adds up in float32 what it
    gets.  Errors of codes are fed back as in LoCo (Xie et al., arXiv 2407.04480).

    Args:
        model: sharded by ``fully_shard``, over one dimension of a mesh or with replicas (HSDP).
        compression: of gradients: "linear" with 2 to 8 ``bits``, "fp8", "bf16", "fp16", or "none",
            as texts or methods.  "none" sends what FSDP2 reduces.
        parameters: of parameters, as the difference to what others know: "linear", "linear:bits=4"
            or "fp8".  ``None``: PyTorch gathers them.  Each rank keeps a copy of the whole model.
        exempt: ``exempt(name, parameter)`` says what is sent as it is; ``None``: parameters of one
            dimension, and embeddings.
        residual: "int8" keeps errors of the whole model in 8 bits per element, ``None`` nothing.
        beta: of LoCo, in [0, 1): the part of what waits that is not fed back in a step.
        reset_every: the number of steps after which errors are dropped; ``None``: never.
        nodes: sums are made by ``inside`` in nodes, then by ``compression`` between them: a number
            of nodes, or "auto" for the host names.  ``None``: all ranks are alike.
        inside: see ``nodes``.
        replicas: the mesh or group of ``compress_replicas``, over which checkpoints average errors.
    """
    method = as_fixed(compression)
    codec, wire = _coded(method, "compression")
    inner, gathered = as_fixed(inside), None if parameters is None else as_fixed(parameters)
    differences = None if gathered is None else _coded(gathered, "parameters")[0]
    if gathered is not None and differences is None:
        raise ConfigError(
            f"parameters={gathered.name!r}: differences are sent as codes, 'linear', "
            "'linear:bits=4' or 'fp8'; for 16 bits set MixedPrecisionPolicy(param_dtype=...)"
        )
    _check(residual, beta, reset_every)
    check_nodes(nodes)
    modules = sharded_modules(model, HOW)
    (first,) = groups_of(modules[0][1])
    for name, module in modules:
        _check_module(name, groups_of(module)[0], first, gathered is not None)
    between = None if replicas is None else group_of(replicas)
    shards = first.mesh_info.shard_process_group
    options = {
        **{"compression": repr(method), "parameters": repr(gathered), "inside": repr(inner)},
        **{"residual, beta, reset_every": f"{residual}, {beta}, {reset_every}"},
        "nodes": text_of(nodes),
    }
    names = names_of(model, modules)
    is_exempt = exempt or _by_kind(model)
    parts = {
        id(module): [
            ShardedParameter(
                names[id(p.sharded_param)],
                p,
                p.padded_sharded_param_size.numel(),
                is_exempt(names[id(p.sharded_param)], p.sharded_param),
            )
            for p in groups_of(module)[0].fsdp_params
        ]
        for _, module in modules
    }
    every = [part for own in parts.values() for part in own]
    shapes = (
        (f"{n} {of.sharded_param.dtype}{' (exempt)' * is_exempt}", of.sharded_param.shape)
        for n, of, _, is_exempt in every
    )
    terms = {**options, "parameters of the model": listed(shapes)}
    agree(terms, shards, *([] if between is None else [between]))
    levels = None if nodes is None else _levels(nodes, shards, first.device, terms)
    keeps = residual is not None and codec is not None
    own_inside = _coded(inner, "inside")
    way = Way(
        codec,
        None if codec is None else own_inside[0],
        wire,
        beta if keeps else None,
        reset_every,
        levels,
    )

    def check() -> None:
        if keeps:
            refuse_scale(method, running_scale() is not None, NO_SCALE)

    scattered, gathers = [], []
    for name, module in modules:
        group, own = groups_of(module)[0], parts[id(module)]
        scattered.append(ReduceScatter(group, own, way, name or "the model", check))
        module.set_custom_reduce_scatter(scattered[-1])
        if differences is not None:
            gathers.append(AllGather(group, own, differences, name or "the model"))
            module.set_custom_all_gather(gathers[-1])
    exchange = ShardExchange(method, scattered, gathers, between)
    if gathers:
        model.register_load_state_dict_post_hook(
            lambda *_: exchange._forget("model.load_state_dict()")
        )
    return exchange


def _coded(method: Compressor, option: str) -> tuple[Codec | None, torch.dtype | None]:
    """Return the codec of a method, or the dtype in which it sends numbers."""
    if isinstance(method, LinearQuantization):
        return linear(method.bits, method.column), None
    if isinstance(method, FP8):
        return float8(method.format, method.bucket), None
    if isinstance(method, BF16 | FP16):
        return None, torch.bfloat16 if isinstance(method, BF16) else torch.float16
    if isinstance(method, NoCompression):
        return None, None
    raise UnsupportedError(
        f"{option}={method.name!r} is no method for shards, each of which one rank sums up: take "
        "'linear', 'linear:bits=4', 'fp8', 'bf16', 'fp16' or 'none'; between replicas "
        "hvd.compress_replicas takes every method"
    )


def _check(residual: Any, beta: Any, reset_every: Any) -> None:
    if residual in ("bf16", "bfloat16", torch.bfloat16):
        raise ConfigError(
            f"residual={residual!r}: bfloat16 has 8 bits of significand, and a residual in it "
            "loses what each step adds: take 'int8', which has a scale for 512 elements, or None"
        )
    if residual not in ("int8", None):
        raise ConfigError(f"residual={residual!r}: pass 'int8' or None")
    if not isinstance(beta, int | float) or not 0 <= beta < 1:
        raise ConfigError(f"beta={beta!r}: pass a number in [0, 1)")
    if reset_every is not None and (not is_whole(reset_every) or reset_every < 1):
        raise ConfigError(f"reset_every={reset_every!r}: pass a number of steps, or None")


def _check_module(name: str, group: Any, first: Any, gathers: bool) -> None:
    """Raise an error if there is no exchange for the parameters of a module.

    Args:
        gathers: they are gathered in codes as well.
    """
    what = name or "the model"
    if not hasattr(group.mesh_info, "shard_process_group"):
        raise UnsupportedError(
            f"{what} is whole on every rank (replicate): its gradients go through "
            "DistributedDataParallel with hvd.ddp_hook"
        )
    if group.mesh_info.shard_process_group != first.mesh_info.shard_process_group:
        raise UnsupportedError(
            f"{what} is divided among other ranks than modules before it: call fully_shard for all "
            "of them with one mesh"
        )
    if isinstance(group._reduce_scatter_comm, ReduceScatter):
        raise ConfigError(f"{what} has compressed shards already: call compress_shards once")
    gather = [group._all_gather_comm] if gathers else []
    for comm in (group._reduce_scatter_comm, *gather):
        if not type(comm).__name__.startswith("Default"):
            raise ConfigError(
                f"{what} has a collective of its own, {type(comm).__name__}: leave out "
                "set_custom_reduce_scatter, set_custom_all_gather, set_symm_mem_for_comm and "
                "set_allocate_memory_from_process_group_for_comm"
            )


def _levels(nodes: Any, shards: Any, device: torch.device, terms: Any) -> NodeGroups | None:
    """Return this rank's place among nodes; ``None`` if there is one, or each has one rank."""
    found = nodes_of(nodes, shards, device, terms)
    if found is None or dist.get_world_size(found.between) == 1:
        return None
    ranks, here = dist.get_process_group_ranks(shards), dist.get_process_group_ranks(found.inside)
    start = dist.get_rank(found.between) * found.ranks
    if ranks[start : start + found.ranks] != here:
        raise ConfigError(
            f"nodes: ranks {here} are a node, and the ranks of a node must be one after the other "
            f"among those that share the model, {ranks}: start them so, or leave nodes out"
        )
    return found


def _by_kind(model: torch.nn.Module) -> _Exempt:
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    embeddings = {
        id(p)
        for module in model.modules()
        if isinstance(module, kinds)
        for p in module.parameters(recurse=False)
    }
    return lambda name, p: p.ndim < 2 or id(p) in embeddings
