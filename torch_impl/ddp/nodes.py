"""The nodes of ranks that train by DistributedDataParallel, and the states of shards."""

from __future__ import annotations

import math
import os
import socket
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_compress.agreement import Terms
from hvd_compress.errors import ConfigError
from hvd_compress.reduce import nodes as reduce_nodes
from hvd_compress.reduce.nodes import table_of
from hvd_compress.reduce.store import MemoryStore

from ..lost_ranks import naming_lost_ranks
from ..process_groups import ProcessGroupEngine
from ..replicas import is_mesh

#: groups by their ranks, of the group that they were made of: several states share them
_made: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


class ShardStore(MemoryStore):
    """States of shards, of which each rank of a group has its own: a gradient has the norm of all.

    Args:
        shards: the process group of the ranks whose shards make a whole gradient.
        device: that of the gradients.
        momentum, nesterov: see ``MemoryStore``.
    """

    def __init__(
        self,
        shards: dist.ProcessGroup,
        device: torch.device,
        momentum: float,
        nesterov: bool,
    ) -> None:
        super().__init__(momentum, nesterov)
        self._shards, self._device = shards, device

    def norm(self, gradients: Mapping[str, torch.Tensor]) -> float:
        """See ``Store.norm``; a collective of the group, also of ranks that have no elements."""
        own = float(super().norm(gradients))
        total = torch.tensor(own * own, dtype=torch.float64, device=self._device)
        with naming_lost_ranks(self._shards):
            dist.all_reduce(total, group=self._shards)
        return math.sqrt(total.item())

    def for_messages(self, like: Any) -> torch.Tensor:
        # There may be no gradient, of which this would be one.
        return like if isinstance(like, torch.Tensor) else torch.empty(0, device=self._device)


class NodeGroups(NamedTuple):
    """This rank's place among nodes of equally many ranks.

    Attributes:
        inside: the process group of the ranks of this node.
        between: that of the ranks with the same place in all nodes.
    """

    inside: dist.ProcessGroup
    between: dist.ProcessGroup

    @property
    def ranks(self) -> int:
        """The number of ranks in a node."""
        return dist.get_world_size(self.inside)


def check_nodes(nodes: Any, method: Any = None) -> None:
    """Raise ``ConfigError`` unless this is a value for the option ``nodes``, and the method, if
    given, can exchange shards."""
    mesh = "; or a mesh of two dimensions, init_device_mesh(device, (nodes, ranks_per_node))"
    reduce_nodes.check_nodes(1 if is_mesh(nodes) else nodes, method, mesh)


def text_of(nodes: Any) -> str:
    """Return the option as ranks compare it."""
    return str(nodes.mesh.tolist()) if is_mesh(nodes) else repr(nodes)


def nodes_of(nodes: Any, group: Any, device: torch.device, terms: Terms) -> NodeGroups | None:
    """Return this rank's place among nodes; ``None`` if each node has one rank, with nothing to
    share.  A collective of all ranks of ``group``, which also compares ``terms``.

    Args:
        nodes: "auto", a number, or a mesh of nodes and their ranks.
        group: the process group that averages; ``None`` for the default one.  New groups have its
            library and its time-out.
        device: that of the gradients.

    Raises:
        ConfigError: nodes have different numbers of ranks, or a mesh has other ranks, or another
            order than ranks with the same shard in a column.
        MismatchError: the ranks differ in ``terms`` or nodes.
    """
    ranks, text = dist.get_process_group_ranks(group or dist.group.WORLD), text_of(nodes)
    # Ranks without nodes compare themselves in their first step, which this would wait for.
    engine = ProcessGroupEngine(group, device)
    engine.agree({**terms, "nodes": text}, torch.empty(0))
    engine.finish()
    if is_mesh(nodes):
        if nodes.ndim != 2 or sorted(nodes.mesh.flatten().tolist()) != sorted(ranks):
            raise ConfigError(
                f"nodes is a mesh of the ranks {text}, and DistributedDataParallel averages over "
                f"ranks {sorted(ranks)}: pass a mesh of two dimensions, nodes and ranks of a node, "
                "of just these"
            )
        # A group's ranks are in ascending order, whatever that of the mesh.
        rows = nodes.mesh.tolist()
        ordered = [list(map(sorted(row).index, row)) for row in rows]
        if ordered.count(ordered[0]) < len(rows):
            raise ConfigError(
                f"nodes is a mesh of the ranks {text}: let the ranks of every row ascend, as those "
                "of init_device_mesh(device, (nodes, ranks_per_node)) do"
            )
        if nodes.size(1) == 1:
            return None
        return NodeGroups(nodes.get_group(1), nodes.get_group(0))
    hosts: list[Any] = [None] * len(ranks)
    if nodes == "auto":
        # torchrun numbers nodes; other launchers do not.
        own = f"{os.environ.get('GROUP_RANK', '')} {socket.gethostname()}"
        dist.all_gather_object(hosts, own, group)
    table = table_of(nodes, ranks, hosts)
    if len(table[0]) == 1:
        return None
    here = next(node for node in table if dist.get_rank() in node)
    place = here.index(dist.get_rank())
    everyone = group or dist.group.WORLD
    library = everyone._get_backend(device)
    timeout = getattr(getattr(library, "options", None), "_timeout", None)  # PyTorch may not say it
    options: dict[str, Any] = {"timeout": timeout, "backend": dist.get_backend(group)}
    made = _made.setdefault(everyone, {})
    parts = tuple(here), tuple(node[place] for node in table)
    for each in parts:
        if each not in made:
            made[each] = dist.new_group(each, use_local_synchronization=True, **options)
    return NodeGroups(*map(made.__getitem__, parts))
