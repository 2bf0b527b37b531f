"""Which ranks have copies of the same shard: groups and meshes of ``torch.distributed``."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.agreement import Terms, differences, encode
from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError

#: how to shard a model for an exchange between replicas
HOW = (
    "shard over one dimension of a mesh and exchange over the other: mesh = init_device_mesh("
    "device, (nodes, ranks_per_node), mesh_dim_names=('replica', 'shard')), "
    "fully_shard(module, mesh=mesh['shard']) for each module, then "
    "hvd.compress_replicas(model, mesh['replica'], 'topk')"
)
_OTHER_TORCH = (
    f"FSDP2 of PyTorch {torch.__version__} keeps parameters elsewhere than that of 2.13, with "
    "which compress_replicas was tested: install that version"
)
#: behind the name of a parameter
STEPS_IN_BACKWARD = (
    "has a hook that runs when its gradient is there, such as an optimizer that steps during "
    "backward. The average over the replicas comes at the end of backward: step after "
    "loss.backward()"
)


def is_group(x: Any) -> bool:
    """Return whether ``x`` names ranks of ``torch.distributed``: a mesh, or a process group."""
    if not dist.is_available():
        return False
    return isinstance(x, dist.ProcessGroup) or is_mesh(x)


def is_mesh(x: Any) -> bool:
    """Return whether ``x`` is a mesh of ranks."""
    return isinstance(x, getattr(dist, "DeviceMesh", ()))  # which PyTorch 2.1 has not


def group_of(replicas: Any) -> dist.ProcessGroup:
    """Return the process group of a mesh of one dimension, or the group that was given.

    Raises:
        ConfigError: it is something else, or this rank is alone in it.
    """
    if not is_group(replicas):
        raise ConfigError(
            f"replicas are given as a mesh, mesh['replica'], or as a process group, not as "
            f"{type(replicas).__name__}"
        )
    if is_mesh(replicas):
        if replicas.ndim != 1:
            raise ConfigError(
                f"the replicas' mesh has {replicas.ndim} dimensions: pass the one that counts the "
                "replicas, mesh['replica']"
            )
        replicas = replicas.get_group()
    if dist.get_world_size(replicas) == 1:
        raise ConfigError(f"there is one replica only, so nothing travels between replicas: {HOW}")
    return replicas


def agree(terms: Terms, *groups: Any) -> None:
    """Compare terms over all ranks that process groups join, ``None`` being the default one, so
    that all raise the error: those without it would wait for the others.

    Raises:
        MismatchError: ranks differ.
    """
    everyone = {dist.get_rank(): encode(terms)}
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, everyone, group=group)
        everyone = {rank: text for part in parts for rank, text in part.items()}
    if len(set(everyone.values())) > 1:
        raise MismatchError(differences([text for _, text in sorted(everyone.items())]))


def is_sharded(x: torch.Tensor) -> bool:
    """Return whether a tensor is a ``DTensor``."""
    tensors = sys.modules.get("torch.distributed.tensor")  # whose import takes long
    return tensors is not None and isinstance(x, tensors.DTensor)


def is_flattened(x: torch.Tensor) -> bool:
    """Return whether ``FullyShardedDataParallel`` has laid a parameter out among others and cut
    it."""
    return getattr(x, "_fsdp_flattened", False)


def local(x: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor: itself, or the shard of a ``DTensor``."""
    shard: torch.Tensor = x.to_local() if is_sharded(x) else x  # type: ignore[attr-defined]
    return shard


def groups_of(module: Any) -> list[Any]:
    """Return FSDP2's groups of the parameters of an ``FSDPModule``: one for each mesh."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):  # up to PyTorch 2.11, which knows one mesh only
        return [group for group in (state._fsdp_param_group,) if group is not None]
    raise UnsupportedError(_OTHER_TORCH)


def sharded_modules(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that ``fully_shard`` has sharded and that have parameters of their own,
    with their names in the model; of those that were given to it together, the first.

    Raises:
        ConfigError: there are none.
        UnsupportedError: parameters of one module are on several meshes.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError as error:
        raise UnsupportedError(_OTHER_TORCH) from error
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
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
            f"parameters: {HOW}. A model that is whole on every rank belongs into "
            "DistributedDataParallel, with the hook hvd.ddp_hook"
        )
    return list(found.values())


def check_apart(shards: Collection[int], replicas: dist.ProcessGroup) -> None:
    """Raise ``ConfigError`` if ranks among which a model is divided are said to be replicas of one
    another."""
    among = set(shards) & set(dist.get_process_group_ranks(replicas))
    if among != {dist.get_rank()}:
        raise ConfigError(
            f"the model is divided among ranks {', '.join(map(str, sorted(shards)))}, and ranks "
            f"{', '.join(map(str, sorted(among)))} of them are given as replicas of one another, "
            f"but have different parts: {HOW}"
        )


def check_shards(parameters: Iterable[Any], replicas: dist.ProcessGroup) -> None:
    """Raise ``ConfigError`` if parameters are divided among ranks of ``replicas``."""
    for p in parameters:
        if is_sharded(p):
            check_apart(p.device_mesh.mesh.flatten().tolist(), replicas)
