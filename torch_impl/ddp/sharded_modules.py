"""The gradient of a module that ``fully_shard`` has sharded, on its way through the hook.

FSDP2 reduces the gradients of a module's parameters inside the shard group into one flat tensor,
hands that to the hook, and makes the parameters' gradients of it afterwards: it divides (for
float16), casts to the dtype of the parameters, and cuts.  The hook returns before the average over
the replicas is there.  So it takes the flat gradient away and leaves ones; what FSDP2 makes of ones
is then the factor by which it would have scaled, in the dtype and the memory that it wants, and the
average has only to be multiplied in.

With ``set_gradient_divide_factor(f)`` PyTorch's own HSDP returns the sum over all ranks, divided by
``f``.  The hook then leaves the number of replicas instead of ones, which makes the average over
them their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from hvd_compress.errors import ConfigError, UnsupportedError

from ..replicas import (
    HOW,
    STEPS_IN_BACKWARD,
    check_apart,
    groups_of,
    is_sharded,
    local,
    sharded_modules,
)


class Part(NamedTuple):
    """A parameter's shard on this rank.

    Attributes:
        name: of the parameter in the model.
        of: FSDP2's object for it, which stays when the parameter is replaced.
        shape: of the shard without padding.
        elements: those of the flat gradient that belong to it, padding included.
    """

    name: str
    of: Any
    shape: torch.Size
    elements: int

    @property
    def parameter(self) -> torch.nn.Parameter:
        """The sharded parameter, a ``DTensor``."""
        return self.of.sharded_param


class ShardedModule:
    """A module with parameters of its own that ``fully_shard`` has sharded.

    Args:
        module: an ``FSDPModule``; its all-reduce hook becomes this object's.
        name: its name in the model, for messages.
        names: of the model's parameters, by their identity.
        replicas: their number.
        begin, start: functions that are called with this object in the hook, before and after the
            gradient is there.

    Raises:
        ConfigError: it has a hook already.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        names: Mapping[int, str],
        replicas: int,
        begin: Callable[[ShardedModule], None],
        start: Callable[[ShardedModule], None],
    ) -> None:
        self.name = name or "the model"
        self._replicas, self._begin, self._start = replicas, begin, start
        (self.group,) = groups_of(module)
        self._policy = module._get_fsdp_state()._mp_policy
        if self.group._all_reduce_hook is not None:
            raise ConfigError(
                f"{self.name} has an all-reduce hook already: call compress_replicas once, for the "
                "whole model"
            )
        self.parts = [
            Part(names[id(p.sharded_param)], p, p.sharded_size, p.padded_sharded_param_size.numel())
            for p in self.group.fsdp_params
        ]
        self._flat: torch.Tensor | None = None  # of this step, as FSDP2 has reduced it
        self._partial: torch.Tensor | None = None  # of passes before, not exchanged yet
        self._before: dict[str, Any] = {}  # gradients that the new ones are added to, by name
        module.set_all_reduce_hook(self._hook)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the gradient arrives."""
        own = self.parts[0].parameter.dtype
        return self._policy.reduce_dtype or self._policy.param_dtype or own

    @property
    def is_under_way(self) -> bool:
        """Whether there is a gradient of it that has not become the parameters'."""
        return self._flat is not None or self._partial is not None

    def trained(self) -> list[Part]:
        """Return the shards of parameters that are trained."""
        return [part for part in self.parts if part.parameter.requires_grad]

    @torch.no_grad()
    def _hook(self, flat: torch.Tensor) -> None:
        """Take the flat gradient of the shard, of shape (elements of all parts,)."""
        self._check(flat)
        if not self.group.all_reduce_grads:  # set_requires_all_reduce(False)
            self._partial = flat.clone() if self._partial is None else self._partial + flat
            flat.zero_()
            return
        self._begin(self)
        self._flat = flat.clone() if self._partial is None else flat + self._partial
        self._partial = None
        # The average over the replicas is part of FSDP2's own factor, unless the user has set that.
        flat.fill_(1 if self.group.gradient_divide_factor is None else self._replicas)
        for part in self.trained():
            if part.parameter.grad is not None:
                self._before[part.name], part.parameter.grad = part.parameter.grad, None
        self._start(self)

    def _check(self, flat: torch.Tensor) -> None:
        trained = self.trained()
        if flat.numel() != sum(part.elements for part in trained):
            raise UnsupportedError(
                f"some parameters of {self.name} have got no gradient in this step, and FSDP2 does "
                "not say which: call module.set_reduce_scatter_unused_params(True) of each "
                "FSDPModule, which makes these gradients zero, or freeze the parameters"
            )
        for part in trained:
            if getattr(part.parameter, "_post_accumulate_grad_hooks", None):
                raise UnsupportedError(f"{part.name} {STEPS_IN_BACKWARD}")

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the shards by name: views of the flat one."""
        flat = cast(torch.Tensor, self._flat)
        found, start = {}, 0
        for part in self.trained():
            if size := part.shape.numel():  # the last ranks may have nothing of a small parameter
                found[part.name] = flat[start : start + size].view(part.shape)
            start += part.elements
        return found

    @torch.no_grad()
    def settle(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Multiply the averages over the replicas, by name, into what FSDP2 has made of ones."""
        for part in self.trained():
            gradient: Any = part.parameter.grad
            if part.name in averages:
                local = gradient.to_local()
                local.mul_(averages[part.name].to(local.device))
            if (before := self._before.pop(part.name, None)) is not None:
                before.to_local().add_(gradient.to_local())
                part.parameter.grad = before
        self._flat = None

    def forget(self) -> None:
        """Discard the gradients that are under way."""
        self._flat = self._partial = None
        self._before.clear()


class ShardedModel:
    """A model that ``fully_shard`` has divided over other ranks than its replicas.

    Attributes:
        shards: the process group among which it is divided.
        device: of its gradients.

    Raises:
        ConfigError: it is not divided so.
    """

    def __init__(self, model: torch.nn.Module, replicas: dist.ProcessGroup) -> None:
        self._model, self._modules = model, sharded_modules(model)
        self._replicas = dist.get_world_size(replicas)
        for name, module in self._modules:
            (parameters,) = groups_of(module)
            mesh = parameters.mesh_info
            if hasattr(mesh, "replicate_process_group"):
                raise ConfigError(
                    f"{name or 'the model'} was given to fully_shard with both dimensions of the "
                    "mesh, so PyTorch averages between replicas itself, uncompressed and before "
                    f"any hook: {HOW}"
                )
            check_apart(dist.get_process_group_ranks(mesh.shard_process_group), replicas)
        (first,) = groups_of(self._modules[0][1])
        self.shards: dist.ProcessGroup = first.mesh_info.shard_process_group
        self.device: torch.device = first.device

    def parameters(self) -> list[tuple[str, torch.Size]]:
        """Return names, each with its dtype, and shapes of the whole parameters."""
        return [(f"{n} {p.dtype}", p.shape) for n, p in self._model.named_parameters()]

    def local_shards(self) -> Iterator[torch.Tensor]:
        """Yield what this rank has of the parameters."""
        for p in self._model.parameters():
            if is_sharded(p) and not p.is_meta:
                yield local(p)

    def modules(
        self, begin: Callable[[ShardedModule], None], start: Callable[[ShardedModule], None]
    ) -> list[ShardedModule]:
        """Register the hooks, and return the modules with their gradients' way."""
        names = {id(p): name for name, p in self._model.named_parameters()}
        return [
            ShardedModule(m, name, names, self._replicas, begin, start) for name, m in self._modules
        ]
