"""Compressed exchanges between the replicas of a model that FSDP2 shards.

Inside a node ``fully_shard`` gathers and reduces as always, over the shard dimension of a mesh.
Between nodes the replicas of each shard average it by a method of this package::

    mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replica", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    exchange = compress_replicas(model, mesh["replica"], "topk:density=0.01")

After ``loss.backward()`` the gradients are averages over all ranks, as with PyTorch's own HSDP.

FSDP2 reduces the gradients of a module's parameters inside the shard group into one flat tensor,
and passes that to a hook.  Afterwards it makes the parameters' gradients of it: it divides (for
float16), casts to the dtype of the parameters, and cuts.  The hook returns before the average over
the replicas is there.  So it takes the flat gradient away and leaves ones.  FSDP2 turns these into
the factor by which it would have scaled, in the dtype and the memory that it wants.  At the end the
average is multiplied in.

With ``set_gradient_divide_factor(f)`` PyTorch's own HSDP returns the sum over all ranks, divided by
``f``.  The hook then leaves the number of replicas instead of ones, which makes the average over
them their sum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_compress.agreement import listed
from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.methods.texts import as_fixed
from hvd_compress.reduce import Reducer
from hvd_compress.reduce.state_file import entry, refused

from ..amp import NO_SCALE, refuse_scale, running_scale
from ..controls import Controls
from ..parameters import is_sharded, local
from ..process_groups import ReplicaEngine
from ..replicas import HOW, agree, check_apart, group_of
from ..state.rank_states import placed
from .hook import check_method
from .nodes import ShardStore

_OTHER_TORCH = (
    f"FSDP2 of PyTorch {torch.__version__} keeps parameters elsewhere than that of 2.13, with "
    "which this package was tested: install that version"
)


class ShardedParameter(NamedTuple):
    """A parameter that ``fully_shard`` has sharded.

    Attributes:
        name: in the model.
        of: FSDP2's object for it, which stays when the parameter is replaced.
        elements: of a rank's shard in FSDP2's flat arrays, padding included.
        is_exempt: ``compress_shards`` sends it as it is, not coded.
    """

    name: str
    of: Any
    elements: int
    is_exempt: bool = False


def trained_of(parts: Sequence[ShardedParameter]) -> list[ShardedParameter]:
    return [part for part in parts if part.of.sharded_param.requires_grad]


def check_complete(
    trained: Sequence[ShardedParameter], flat: torch.Tensor, name: str, shards: int = 1
) -> None:
    """Raise ``UnsupportedError`` unless a flat gradient has this number of shards of all these."""
    if flat.numel() != shards * sum(part.elements for part in trained):
        raise UnsupportedError(
            f"some parameters of {name} have got no gradient in this step, and FSDP2 does not say "
            "which: call module.set_reduce_scatter_unused_params(True) of each FSDPModule, which "
            "makes these gradients zero, or freeze the parameters"
        )


class ShardedModule:
    """A module with parameters of its own that ``fully_shard`` has sharded.

    Args:
        module: an ``FSDPModule``; its all-reduce hook becomes this object's.
        name: its name in the model, for messages.
        names: of the model's parameters, by their identity.
        replicas: their number.
        start: called in the hook with this object and the flat gradient, which it gets back by
            :meth:`take`.

    Raises:
        ConfigError: it has a hook already.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        names: Mapping[int, str],
        replicas: int,
        start: Callable[[ShardedModule, torch.Tensor], None],
    ) -> None:
        self.name = name or "the model"
        self._replicas, self._start = replicas, start
        (self.group,) = groups_of(module)
        self._policy = module._get_fsdp_state()._mp_policy
        if self.group._all_reduce_hook is not None:
            raise ConfigError(
                f"{self.name} has an all-reduce hook already: call compress_replicas once, for the "
                "whole model"
            )
        self.parts = [
            ShardedParameter(names[id(p.sharded_param)], p, p.padded_sharded_param_size.numel())
            for p in self.group.fsdp_params
        ]
        self._flat: torch.Tensor | None = None  # of this step, as FSDP2 has reduced it
        self._partial: torch.Tensor | None = None  # of passes before, not exchanged yet
        self._before: dict[str, Any] = {}  # gradients that the new ones are added to, by name
        module.set_all_reduce_hook(self._hook)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the gradient arrives."""
        own = self.parts[0].of.sharded_param.dtype
        return self._policy.reduce_dtype or self._policy.param_dtype or own

    @property
    def is_under_way(self) -> bool:
        """Whether there is a gradient of it that has not become the parameters'."""
        return self._flat is not None or self._partial is not None

    @torch.no_grad()
    def _hook(self, flat: torch.Tensor) -> None:
        """Take the flat gradient of the shard, of shape (elements of all parts,)."""
        self._check(flat)
        whole = flat.clone() if self._partial is None else self._partial + flat
        if not self.group.all_reduce_grads:  # set_requires_all_reduce(False)
            self._partial = whole
            flat.zero_()
            return
        self._start(self, whole)
        self._partial = None
        # The average over the replicas is part of FSDP2's own factor, unless the user has set that.
        flat.fill_(1 if self.group.gradient_divide_factor is None else self._replicas)

    def _check(self, flat: torch.Tensor) -> None:
        trained = trained_of(self.parts)
        check_complete(trained, flat, self.name)
        for part in trained:
            if getattr(part.of.sharded_param, "_post_accumulate_grad_hooks", None):
                raise UnsupportedError(
                    f"{part.name} has a hook that runs when its gradient is there, such as an "
                    "optimizer that steps during backward. The average over the replicas comes at "
                    "the end of backward: step after loss.backward()"
                )

    def take(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradients of the shards by name: views of the flat one."""
        self._flat = flat
        found, start = {}, 0
        for part in trained_of(self.parts):
            p, shape = part.of.sharded_param, part.of.sharded_size
            if p.grad is not None:
                self._before[part.name], p.grad = p.grad, None
            if size := shape.numel():  # the last ranks may have nothing of a small parameter
                found[part.name] = flat[start : start + size].view(shape)
            start += part.elements
        return found

    @torch.no_grad()
    def settle(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Multiply the averages over the replicas, by name, into what FSDP2 has made of ones."""
        for part in trained_of(self.parts):
            p = part.of.sharded_param
            gradient = p.grad
            if part.name in averages:
                shard = gradient.to_local()
                shard.mul_(averages[part.name].to(shard.device))
            if (before := self._before.pop(part.name, None)) is not None:
                before.to_local().add_(gradient.to_local())
                p.grad = before
        self._flat = None

    def forget(self) -> None:
        self._flat = self._partial = None
        self._before.clear()


class ReplicaExchange(Controls):
    """The result of :func:`compress_replicas`: the exchange between the replicas of a model.

    A backward pass starts it module by module, as FSDP2 has reduced their gradients inside the
    shard group, and waits for all at its end.

    States are those of this rank's shards, and statistics count what it exchanges with other
    replicas.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        modules: list[tuple[str, Any]],
        reducer: Reducer,
        device: torch.device,
    ) -> None:
        self.reducer, self._device = reducer, device
        names = names_of(model, modules)
        self._modules = [
            ShardedModule(module, name, names, reducer.engine.size, self._start)
            for name, module in modules
        ]
        self._begun: list[ShardedModule] = []
        self._is_awaited = False  # the end of this backward pass
        self._stream: Any = None  # of a GPU, on which hooks run
        model.register_forward_pre_hook(self._look_back)

    # -- the backward pass -------------------------------------------------------------------

    def _start(self, module: ShardedModule, flat: torch.Tensor) -> None:
        refuse_scale(self.reducer.method, running_scale() is not None, NO_SCALE)
        if module in self._begun:  # it is used twice in this step
            self._finish()
        if not self._is_awaited:
            # Behind FSDP2's own callback, in which hooks of the first modules may run.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._is_awaited = True
        if self._device.type != "cpu":
            self._stream = torch.accelerator.current_stream(self._device)
        self._begun.append(module)
        if gradients := module.take(flat):  # replicas of this rank have nothing either
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

    def _make_states(self) -> None:
        """Make the states of shards that have had no gradient yet: who loads a checkpoint asks
        first what there may be."""
        method, store = self.reducer.method, self.reducer.store
        for module in self._modules:
            for part in trained_of(module.parts):
                name, shape = part.name, part.of.sharded_size
                if shape.numel():
                    like = torch.zeros(shape, dtype=module.dtype, device=self._device)
                    store.state_for(name, like, method.for_tensor(name, tuple(shape)))


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
    """Average gradients between replicas of a model that ``fully_shard`` (FSDP2) has sharded, by
    a compression method.  A collective of all ranks, before the first step::

        names = ("replica", "shard")
        mesh = init_device_mesh("cuda", (nodes, gpus_of_a_node), mesh_dim_names=names)
        fully_shard(model, mesh=mesh["shard"])
        exchange = hvd.compress_replicas(model, mesh["replica"], "topk:density=0.01")

    The shards of the first replica are copied to the others.  Each parameter's shard is one tensor
    for the method, of the shape that it has on this rank; its name is the parameter's.

    Args:
        model: sharded over the shard dimension alone, ``fully_shard(layer, mesh=mesh["shard"])``.
        replicas: ``mesh["replica"]``, or the process group of the ranks with the same shard.
        compression: a method, its class, its name, or a text such as "dgc:density=0.01".
        momentum, nesterov: for methods that take momentum over (DGC): then the optimizer must have
            none.  ``momentum=0.0`` for none at all.
        seed: for randomness that the ranks share.

    Raises:
        UnsupportedError: the model is in ``FullyShardedDataParallel`` (FSDP1), or parameters of one
            module are on several meshes.
    """
    method: Compressor = as_fixed(compression)
    check_method(method, momentum, "compress_replicas(model, mesh['replica'], {})")
    group = group_of(replicas)
    modules = _replicated_modules(model, group)
    (first,) = groups_of(modules[0][1])
    shards, device = first.mesh_info.shard_process_group, first.device
    options = {"method": repr(method), "momentum, nesterov": f"{momentum}, {nesterov}"}
    parameters = listed((f"{name} {p.dtype}", p.shape) for name, p in model.named_parameters())
    agree({**options, "seed": str(seed), "parameters": parameters}, group, shards)
    reducer = Reducer(
        method,
        ReplicaEngine(group, device),
        store=ShardStore(shards, device, momentum or 0.0, nesterov),
        momentum=momentum or 0.0,
        nesterov=nesterov,
        seed=seed,
        same_order=True,
        in_place=True,
    )
    method.bind(reducer)
    exchange = ReplicaExchange(model, modules, reducer, device)
    root = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for shard in (local(p) for p in model.parameters() if is_sharded(p) and not p.is_meta):
            whole = shard.contiguous()
            dist.broadcast(whole, root, group=group)
            shard.copy_(whole)
    return exchange


def _replicated_modules(
    model: torch.nn.Module, replicas: dist.ProcessGroup
) -> list[tuple[str, Any]]:
    """Return :func:`sharded_modules` of a model that ``replicas`` have whole.

    Raises:
        ConfigError: they are sharded among these, or PyTorch averages between replicas.
    """
    found = sharded_modules(model, HOW)
    for name, module in found:
        (parameters,) = groups_of(module)
        mesh = parameters.mesh_info
        if hasattr(mesh, "replicate_process_group"):
            raise ConfigError(
                f"{name or 'the model'} was given to fully_shard with both dimensions of the "
                "mesh, so PyTorch averages between replicas itself, uncompressed and before any "
                f"hook: {HOW}"
            )
        check_apart(dist.get_process_group_ranks(mesh.shard_process_group), replicas)
    return found


def sharded_modules(model: torch.nn.Module, how: str) -> list[tuple[str, Any]]:
    """Return the modules that ``fully_shard`` has sharded and that have parameters of their own,
    with their names in the model.  For modules that were given to it together, this is the first.

    Args:
        how: what to write instead, for errors.

    Raises:
        ConfigError: there are none.
        UnsupportedError: another FSDP has the model, or parameters of one module are on several
            meshes.
    """
    from torch.distributed import fsdp  # whose import takes long

    if not hasattr(fsdp, "FSDPModule"):
        raise UnsupportedError(_OTHER_TORCH)
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, getattr(fsdp, "FullyShardedDataParallel", ())):
            raise UnsupportedError(
                "this model is in FullyShardedDataParallel (FSDP1), which PyTorch has deprecated "
                f"in favour of fully_shard, and whose gradients have no exchange here: {how}"
            )
        if not isinstance(module, fsdp.FSDPModule):
            continue
        groups = groups_of(module)
        if len(groups) > 1:
            raise UnsupportedError(
                f"parameters of {name or 'the model'} are on several meshes (shard_placement_fn), "
                "where PyTorch has no hook: call fully_shard for each part with one mesh"
            )
        if groups:
            found.setdefault(id(groups[0]), (name, module))
    if not found:
        raise ConfigError(
            "fully_shard was not called for any module of this model, or for none with "
            f"parameters: {how}. A model that is whole on every rank belongs into "
            "DistributedDataParallel, with the hook hvd.ddp_hook"
        )
    return list(found.values())


def names_of(model: torch.nn.Module, modules: list[tuple[str, Any]]) -> dict[int, str]:
    """Return the names of a model's parameters, by their identity.

    Raises:
        ConfigError: those of a module are not the ones that ``fully_shard`` has made.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for name, module in modules:
        if not all(id(p.sharded_param) in names for p in groups_of(module)[0].fsdp_params):
            raise ConfigError(
                f"parameters of {name or 'the model'} are others than fully_shard has made: a "
                "forward pass has gathered them, or they were replaced. Make the exchange after "
                "fully_shard and before the first step; model.reshard() undoes a forward pass"
            )
    return names


def groups_of(module: Any) -> list[Any]:
    """Return FSDP2's groups of the parameters of an ``FSDPModule``: one for each mesh."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):  # up to PyTorch 2.11, which knows one mesh only
        return [group for group in (state._fsdp_param_group,) if group is not None]
    raise UnsupportedError(_OTHER_TORCH)
