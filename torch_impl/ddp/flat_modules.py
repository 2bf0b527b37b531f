"""The gradient of a unit of ``FullyShardedDataParallel`` (FSDP1), on its way through the
communication hook.

FSDP1 flattens the parameters of a unit into one, of which each rank of the shard group has a part,
and leaves the reduction to the hook.  The hook reduces inside the shard group as FSDP1 would, hands
the result to the exchange between replicas, and leaves zeros; when FSDP1 has put these where the
optimizer looks, or added them to gradients of passes before, the averages are added.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_compress.errors import ConfigError, UnsupportedError

from ..replicas import STEPS_IN_BACKWARD, check_apart
from .process_groups import reduce_scatter

#: how to shard a model with FSDP1 for an exchange between replicas
HOW_FLAT = (
    "shard over one dimension of a mesh, and exchange over the other: "
    "FullyShardedDataParallel(model, device_mesh=mesh['shard'], "
    "sharding_strategy=ShardingStrategy.FULL_SHARD), then "
    "hvd.compress_replicas(model, mesh['replica'], 'topk')"
)


class FlatPart(NamedTuple):
    """The part of a parameter that this rank has.

    Attributes:
        name: of the parameter in the model.
        shape: (elements,); FSDP1 cuts without regard to rows.
        start: where it begins in the flat shard.
        original: the parameter itself where the unit keeps it (``use_orig_params``).
    """

    name: str
    shape: torch.Size
    start: int
    original: torch.nn.Parameter | None


class FlatModule:
    """A unit of ``FullyShardedDataParallel`` with parameters of its own.

    Args:
        unit: the wrapped module; its communication hook becomes this object's.
        name: its name in the model.
        replicas: their number.
        begin, start: functions that are called with this object in the hook, before and after the
            gradient is there.

    Raises:
        ConfigError: it has a hook already.
    """

    def __init__(
        self,
        unit: Any,
        name: str,
        replicas: int,
        begin: Callable[[FlatModule], None],
        start: Callable[[FlatModule], None],
    ) -> None:
        self.name = name or "the model"
        self._unit, self._replicas, self._begin, self._start = unit, replicas, begin, start
        if unit._comm_hook is not None:
            raise ConfigError(
                f"{self.name} has a communication hook already: call compress_replicas once, for "
                "the whole model, and no register_comm_hook"
            )
        self._parameter = unit._handle.flat_param
        names = _names(unit, name)
        originals = self._parameter._params or [None] * len(names)
        self.parts = [
            FlatPart(n, torch.Size([own.numel_in_shard]), own.offset_in_shard, original)
            for n, own, original in zip(
                names, self._parameter._shard_param_infos, originals, strict=True
            )
            if own.in_shard
        ]
        self._flat: torch.Tensor | None = None  # of this step, reduced inside the shard group
        self._factor = 1  # by which its averages are multiplied
        unit._comm_hook, unit._comm_hook_state = self._hook, self

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the gradient arrives."""
        dtype: torch.dtype = self._unit._handle._reduce_dtype
        return dtype

    @property
    def is_under_way(self) -> bool:
        """Whether there is a gradient of it that has not become the parameters'."""
        return self._flat is not None

    def trained(self) -> list[FlatPart]:
        """Return the parts of parameters that are trained."""
        if not self._parameter.requires_grad:
            return []
        return [p for p in self.parts if p.original is None or p.original.requires_grad]

    @staticmethod
    @torch.no_grad()
    def _hook(module: FlatModule, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Reduce the unit's gradient, of shape (ranks of the shard group * elements,), and take
        the shard, of shape (elements,), away."""
        unit = module._unit
        for part in module.parts:
            if hasattr(part.original, "_in_backward_optimizers"):
                raise UnsupportedError(f"{part.name} {STEPS_IN_BACKWARD}")
        module._begin(module)
        before, after = unit._gradient_predivide_factor, unit._gradient_postdivide_factor
        full.div_(before)
        reduce_scatter(shard, full, group=unit.process_group)
        module._flat = shard / after
        # A factor that the user has set divides the sum over all ranks, and an average follows.
        module._factor = 1 if before * after == unit.process_group.size() else module._replicas
        shard.zero_()
        module._start(module)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients of the parts by name: views of the flat one."""
        assert isinstance(self._flat, torch.Tensor)
        return {p.name: self._flat[p.start : p.start + p.shape.numel()] for p in self.trained()}

    @torch.no_grad()
    def settle(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Add the averages over the replicas, by name, to what FSDP1 has made of zeros."""
        gradient = self._unit._handle.sharded_grad
        for part in self.trained():
            if part.name in averages:
                own = gradient[part.start : part.start + part.shape.numel()]
                own.add_(averages[part.name].to(own.device), alpha=self._factor)
        self._flat = None

    def forget(self) -> None:
        """Discard the gradient that is under way."""
        self._flat = None


class FlatModel:
    """A model that ``FullyShardedDataParallel`` has divided over other ranks than its replicas.

    Attributes:
        shards: the process group among which it is divided.
        device: of its gradients.

    Raises:
        ConfigError: it is not divided so.
    """

    def __init__(self, model: torch.nn.Module, replicas: dist.ProcessGroup) -> None:
        self._replicas = dist.get_world_size(replicas)
        self._units = [(n, unit) for n, unit in _units(model) if unit._handle is not None]
        for name, unit in self._units:
            strategy = unit.sharding_strategy.name
            if strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
                raise ConfigError(
                    f"{name or 'the model'} has the sharding strategy {strategy}, in which "
                    "FullyShardedDataParallel has no hook for this exchange: "
                    + (
                        "a model that is whole on every rank belongs into DistributedDataParallel, "
                        "with the hook hvd.ddp_hook"
                        if strategy == "NO_SHARD"
                        else HOW_FLAT
                    )
                )
            if unit.cpu_offload.offload_params:
                raise UnsupportedError(
                    f"{name or 'the model'} has cpu_offload, and its gradients go to the host "
                    "before the exchange is over: leave cpu_offload out, or shard with fully_shard "
                    "and its CPUOffloadPolicy"
                )
            check_apart(dist.get_process_group_ranks(unit.process_group), replicas)
        _, first = self._units[0]
        self.shards: dist.ProcessGroup = first.process_group
        self.device: torch.device = first.compute_device

    def parameters(self) -> list[tuple[str, torch.Size]]:
        """Return names, each with its dtype, and shapes of the whole parameters."""
        return [
            (f"{n} {unit._handle.flat_param.dtype}", shape)
            for name, unit in self._units
            for n, shape in zip(_names(unit, name), unit._handle.flat_param._shapes, strict=True)
        ]

    def local_shards(self) -> Iterator[torch.Tensor]:
        """Yield what this rank has of the parameters."""
        for _, unit in self._units:
            yield unit._handle.flat_param.detach()

    def modules(self, begin: Callable[..., None], start: Callable[..., None]) -> list[FlatModule]:
        """Register the hooks, and return the units with their gradients' way."""
        return [FlatModule(unit, name, self._replicas, begin, start) for name, unit in self._units]


def _names(unit: Any, name: str) -> list[str]:
    prefix = f"{name}." if name else ""
    return [f"{prefix}{n}" for n in map(_clean, unit._handle.flat_param._fqns)]


def _clean(name: str) -> str:
    """Return a name as it was before modules were wrapped."""
    from torch.distributed.fsdp._common_utils import clean_tensor_name

    cleaned: str = clean_tensor_name(f"{name}.")  # of a wrapper itself, too
    return cleaned.removesuffix(".")


def _units(model: torch.nn.Module) -> list[tuple[str, Any]]:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    found, of_fsdp2 = [], False
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            found.append((_clean(name), module))
        of_fsdp2 |= isinstance(module, FSDPModule)
    if found and of_fsdp2:
        raise UnsupportedError(
            "some modules of this model are in FullyShardedDataParallel, and for others "
            "fully_shard was called: use one of them for the whole model"
        )
    return found


def is_flat(model: torch.nn.Module) -> bool:
    """Return whether ``FullyShardedDataParallel`` has a part of a model, or the whole."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whose import takes long
    wrapper = getattr(fsdp, "FullyShardedDataParallel", ())
    return any(isinstance(module, wrapper) for module in model.modules())
