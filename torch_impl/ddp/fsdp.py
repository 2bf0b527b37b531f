"""Compressed exchanges between the replicas of a model that FSDP2, or FSDP1, shards.

Inside a node ``fully_shard`` gathers and reduces as always, over the shard dimension of a mesh;
between nodes the replicas of each shard average it by a method of this package::

    mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replica", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    exchange = compress_replicas(model, mesh["replica"], "topk:density=0.01")

After ``loss.backward()`` the gradients are averages over all ranks, as with PyTorch's own HSDP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from hvd_compress.agreement import listed
from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError
from hvd_compress.methods import PowerSGD, as_fixed
from hvd_compress.reduce import Reducer
from hvd_compress.reduce.state_file import entry, refused
from hvd_compress.stats import Stats

from ..amp import NO_SCALE, refuse_scale, running_scale, watch_scale
from ..replicas import agree, group_of
from ..state.rank_states import placed
from .flat_modules import FlatModel, FlatModule, FlatPart, is_flat
from .hook import check_method
from .nodes import ShardStore
from .process_groups import ReplicaEngine
from .sharded_modules import Part, ShardedModel, ShardedModule

Module: TypeAlias = ShardedModule | FlatModule


class ReplicaExchange:
    """The result of :func:`compress_replicas`: the exchange between the replicas of a model.

    A backward pass starts it module by module, as FSDP2 has reduced their gradients inside the
    shard group, and waits for all at its end.

    Attributes:
        reducer: has the method, and the states of this rank's shards by name of the parameter.
    """

    def __init__(
        self, model: torch.nn.Module, sharded: ShardedModel | FlatModel, reducer: Reducer
    ) -> None:
        self.reducer, self._device = reducer, sharded.device
        self._modules: Sequence[Module] = sharded.modules(self._begin, self._start)
        self._begun: list[Module] = []
        self._is_awaited = False  # the end of this backward pass
        self._stream: Any = None  # of a GPU, on which hooks run
        model.register_forward_pre_hook(self._look_back)

    # -- the backward pass -------------------------------------------------------------------

    def _begin(self, module: Module) -> None:
        refuse_scale(self.reducer.method, running_scale() is not None, NO_SCALE)
        if module in self._begun:  # it is used twice in this step
            self._finish()
        if not self._is_awaited:
            # Behind FSDP2's own callback, in which hooks of the first modules may run.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._is_awaited = True

    def _start(self, module: Module) -> None:
        if self._device.type != "cpu":
            self._stream = torch.accelerator.current_stream(self._device)
        self._begun.append(module)
        if gradients := module.gradients():  # replicas of this rank have nothing either
            self.reducer.start_together(gradients)

    def _end(self) -> None:
        self._is_awaited = False
        if self._stream is None:
            self._finish()
            return
        streams = torch.get_device_module(self._device)
        with streams.stream(self._stream):  # on which FSDP2 has made the parameters' gradients
            self._finish()
        streams.current_stream(self._device).wait_stream(self._stream)

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        averages = self.reducer.finish() if begun else {}  # also where all shards are empty
        for module in begun:
            module.settle(averages)

    def _look_back(self, *_: Any) -> None:
        """Forget a backward pass that an exception has ended."""
        if self._is_awaited:
            self.abandon()

    def abandon(self) -> None:
        """Discard the gradients of a backward pass that has failed, on all ranks, as FSDP2's
        ``model.reset_iter_state()`` does; the next forward pass does it by itself."""
        self._begun, self._is_awaited = [], False
        self.reducer.abandon()
        for module in self._modules:
            module.forget()

    def keep_undo(self) -> None:
        """Keep what waits as it was before each backward pass, from now on, for :meth:`discard`: as
        much memory as the states once more, and the time to copy them.  To be called on all ranks.
        """
        self.reducer.keep_undo()

    def discard(self) -> None:
        """Take back what the last backward pass has exchanged, on all ranks, since no step will use
        it: residuals, velocities and the number of the step are those of before.  Gradients are the
        caller's.

        Raises:
            ConfigError: :meth:`keep_undo` was not called, or there is nothing to take back.
        """
        self.reducer.discard()

    # -- statistics --------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return the exact bytes that this rank has exchanged with other replicas, and the norms of
        the residuals, by parameter and in total."""
        return self.reducer.stats()

    def reset_stats(self) -> None:
        """Begin at zero with all that :meth:`stats` counts."""
        self.reducer.reset_stats()

    def set_epoch(self, epoch: float) -> None:
        """Announce an epoch, for schedules by epoch."""
        self.reducer.set_epoch(epoch)

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states of this rank's shards, under the name of the rank; no collective.

        It is for ``torch.distributed.checkpoint``, which takes this object itself beside model and
        optimizer, or for ``torch.save`` on every rank.
        """
        self._check_at_rest()
        self._make_states()
        saved = self.reducer.state_dict(consolidate=False)
        states = saved.pop("states")
        keys = {name: sorted(state) for name, state in states.items()}
        about = json.dumps({**saved, "keys": keys})
        return {_own_key(): {"about": about, "states": states}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank, of as many.

        Raises:
            ConfigError: it belongs to other ranks, another model or method, or it is damaged; then
                nothing has changed.
        """
        self._check_at_rest()
        if _own_key() not in state_dict:
            raise refused(
                f"it has {', '.join(map(str, state_dict)) or 'nothing'}, and this is {_own_key()}: "
                "each rank loads what it has saved, with as many ranks on the same mesh; with "
                "others leave it out, and training begins with empty residuals"
            )
        own = entry(state_dict, _own_key(), Mapping)
        states = entry(own, "states", Mapping)
        try:
            about = json.loads(entry(own, "about", str))
            keys = about.pop("keys")
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise refused(f"its text 'about' is damaged: {error!r}") from error
        here = {part.name for module in self._modules for part in module.parts}
        if unknown := states.keys() - here:
            raise refused(f"it has a state of {min(unknown)!r}, which the model has not")
        for name, there in keys.items():
            if name not in states or there != sorted(states[name]):
                raise refused(
                    f"of {name!r} not everything was loaded: take a step before "
                    f"torch.distributed.checkpoint.load, since {self.reducer.method.name} makes "
                    "some of its state there; or use torch.save and torch.load on every rank"
                )
        states = placed(states, lambda name: self._device)
        self.reducer.load_state_dict({**about, "states": states})

    def _check_at_rest(self) -> None:
        if any(module.is_under_way for module in self._modules):
            raise ConfigError(
                "gradients are under way: save and load between steps, when the gradients of all "
                "passes have been exchanged; after a backward pass that has failed on all ranks "
                "call abandon()"
            )

    def _parts(self) -> dict[str, tuple[Part | FlatPart, torch.dtype]]:
        return {
            part.name: (part, module.dtype)
            for module in self._modules
            for part in module.trained()
            if part.shape.numel()
        }

    def _make_states(self) -> None:
        """Make the states of shards that have had no gradient yet: who loads a checkpoint asks
        first what there may be."""
        method, store = self.reducer.method, self.reducer.store
        for name, (part, dtype) in self._parts().items():
            like = torch.zeros(part.shape, dtype=dtype, device=self._device)
            store.state_for(name, like, method.for_tensor(name, tuple(part.shape)))


def _own_key() -> str:
    return f"rank {dist.get_rank()}"


def compress_replicas(
    model: torch.nn.Module,
    replicas: Any,
    compression: Any,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    seed: int = 0,
) -> ReplicaExchange:
    """Average gradients between the replicas of a model that ``fully_shard`` (FSDP2) or
    ``FullyShardedDataParallel`` (FSDP1) has sharded, by a compression method.  A collective of all
    ranks, before the first step.

    The shards of the first replica are copied to the others.  Each parameter's shard is one tensor
    for the method, of the shape that it has on this rank; its name is the parameter's::

        names = ("replica", "shard")
        mesh = init_device_mesh("cuda", (nodes, gpus_of_a_node), mesh_dim_names=names)
        fully_shard(model, mesh=mesh["shard"])
        exchange = hvd.compress_replicas(model, mesh["replica"], "topk:density=0.01")

    Args:
        model: sharded over the shard dimension alone, ``fully_shard(layer, mesh=mesh["shard"])``;
            or, with FSDP1, ``FullyShardedDataParallel(model, device_mesh=mesh["shard"])``, whose
            pieces of parameters are vectors.
        replicas: ``mesh["replica"]``, or the process group of the ranks with the same shard.
        compression: a method, its class, its name, or a text such as "dgc:density=0.01".
        momentum, nesterov: for methods that take momentum over (DGC): then the optimizer must have
            none.  ``momentum=0.0`` for none at all.
        seed: for randomness that the ranks share.

    Raises:
        ConfigError: the model is not sharded so, there is one replica only, or the method takes
            momentum over, and none was named.
        MismatchError: the ranks differ in method, options or parameters.
    """
    method: Compressor = as_fixed(compression)
    check_method(method, momentum, "compress_replicas(model, mesh['replica'], {})")
    flat = is_flat(model)
    if flat and isinstance(method, PowerSGD):
        raise ConfigError(
            "FullyShardedDataParallel cuts parameters without regard to rows, so powersgd would "
            "find no matrix and send everything: shard with fully_shard, or take another method"
        )
    group = group_of(replicas)
    sharded = FlatModel(model, group) if flat else ShardedModel(model, group)
    options = {"method": repr(method), "momentum, nesterov": f"{momentum}, {nesterov}"}
    terms = {**options, "seed": str(seed), "parameters": listed(sharded.parameters())}
    agree(terms, group, sharded.shards)
    reducer = Reducer(
        method,
        ReplicaEngine(group, sharded.device),
        store=ShardStore(sharded.shards, sharded.device, momentum or 0.0, nesterov),
        momentum=momentum or 0.0,
        nesterov=nesterov,
        seed=seed,
        same_order=True,
        in_place=True,
    )
    method.bind(reducer)
    exchange = ReplicaExchange(model, sharded, reducer)
    _copy(sharded.local_shards(), group)
    return exchange


@torch.no_grad()
def _copy(shards: Iterable[torch.Tensor], replicas: Any) -> None:
    """Give all replicas the shards of the first."""
    first = dist.get_global_rank(replicas, 0)
    for shard in shards:
        whole = shard.contiguous()
        dist.broadcast(whole, first, group=replicas)
        shard.copy_(whole)


watch_scale()
