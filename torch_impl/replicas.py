"""Which ranks have copies of the same shard: groups and meshes of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch.distributed as dist

from hvd_compress.agreement import Terms, differences, encode
from hvd_compress.errors import ConfigError, MismatchError

from .parameters import is_sharded

#: how to shard a model for an exchange between replicas
HOW = (
    "shard over one dimension of a mesh and exchange over the other: mesh = init_device_mesh("
    "device, (nodes, ranks_per_node), mesh_dim_names=('replica', 'shard')), "
    "fully_shard(module, mesh=mesh['shard']) for each module, then "
    "hvd.compress_replicas(model, mesh['replica'], 'topk')"
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
    """Compare terms over all ranks that process groups join, ``None`` being the default one.  All
    raise the error: ranks without it would wait for the others.
    """
    everyone = {dist.get_rank(): encode(terms)}
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, everyone, group=group)
        everyone = {rank: text for part in parts for rank, text in part.items()}
    if len(set(everyone.values())) > 1:
        raise MismatchError(differences([text for _, text in sorted(everyone.items())]))


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
