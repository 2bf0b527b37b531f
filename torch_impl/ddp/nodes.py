"""Several ranks in a node, which share the work of an exchange between nodes.

The ranks of a node average a bucket of gradients among themselves, uncompressed.  Each keeps a
shard of it: 1/L of the elements, if a node has L ranks.  Ranks with the same shard exchange it
between nodes, by a method with states of the shard alone.  At last a node's ranks give each other
their results.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_compress.agreement import Terms
from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.reduce.store import MemoryStore

from ..replicas import agree, is_mesh
from .lost_ranks import naming_lost_ranks
from .process_groups import all_gather, reduce_scatter


class Nodes:
    """This rank's place among nodes of equally many ranks.

    Args:
        inside: the process group of the ranks of this node.
        between: that of the ranks with the same place in all nodes.

    Attributes:
        place, ranks: this rank's place in its node, and the number of ranks there.
    """

    def __init__(self, inside: dist.ProcessGroup, between: dist.ProcessGroup) -> None:
        self.inside, self.between = inside, between
        self.place, self.ranks = dist.get_rank(inside), dist.get_world_size(inside)

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's row, of shape (elements,), in the average of the node's arrays of
        shape (ranks, elements), in their dtype.  ``rows`` may be overwritten."""
        # Sums of float16 stay in its range, and a power of two leaves the significands as they are.
        is_half = rows.dtype == torch.float16
        before = 2.0 ** (self.ranks - 1).bit_length() if is_half else 1.0
        if before != 1:
            rows.div_(before)
        own = rows.new_empty(rows.shape[1])
        with naming_lost_ranks(self.inside):
            reduce_scatter(own, rows.view(-1), group=self.inside)
        return own.div_(self.ranks / before)

    def unused(self, names: Sequence[str], own: Collection[str], device: torch.device) -> set[str]:
        """Return which of these parameters no rank of the node has used, given those that this rank
        has not."""
        used = torch.tensor([name not in own for name in names], dtype=torch.int32, device=device)
        with naming_lost_ranks(self.inside):
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.inside)
        return {name for name, any_ in zip(names, used.tolist(), strict=True) if not any_}

    def all_rows(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of the node's ranks, of shape (ranks, elements)."""
        rows = own.new_empty(self.ranks, own.numel())
        with naming_lost_ranks(self.inside):
            all_gather(rows.view(-1), own, group=self.inside)
        return rows


class _Cut(NamedTuple):
    """How a tensor lies in the rows of a node's ranks.

    Attributes:
        begin: its first element in each row.
        least: its elements in each row.
        row: further ones in the first ``more`` rows.
    """

    begin: int
    least: int
    row: int
    more: int


class BucketShard:
    """A bucket of gradients on its way through a node.

    Each tensor is divided by itself, so that a rank has the same part of it in whatever bucket DDP
    puts it.  A tensor with at least as many rows as the node has ranks is divided by rows, so that
    a method finds a matrix.  Any other is divided by elements.  Parts differ by one row at most.

    Args:
        nodes: where this rank is.
        views: the gradients, with the elements in the parameters' order; not empty.

    Attributes:
        parts: this rank's part of each gradient in the average over the node; views of one tensor.
    """

    def __init__(self, nodes: Nodes, views: Sequence[torch.Tensor]) -> None:
        self._nodes, self._views = nodes, views
        #: the gradients' memory, or copies where that has another order
        self._flats = [view.reshape(-1) for view in views]
        self._cuts: list[_Cut] = []
        own: list[tuple[int, torch.Size]] = []
        begin = 0
        for view in views:
            by_rows = view.ndim > 1 and len(view) >= nodes.ranks
            row = view.shape[1:] if by_rows else torch.Size()
            least, more = divmod(len(view) if by_rows else view.numel(), nodes.ranks)
            self._cuts.append(_Cut(begin, least * row.numel(), row.numel(), more))
            own.append((begin, torch.Size([least + (nodes.place < more), *row])))
            begin += (least + (more > 0)) * row.numel()
        rows = views[0].new_empty(nodes.ranks, begin)
        gradients, places = self._pieces(rows)
        if places:  # else all parameters are empty
            torch._foreach_copy_(places, gradients)
        self._own = nodes.mean(rows)
        self.parts = [self._own[start : start + x.numel()].view(x) for start, x in own]

    def _pieces(self, rows: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the pieces of the gradients, and where they are in ``rows``.  Those of the ranks
        that have a row more come first."""
        gradients, places = [], []
        for flat, (begin, least, row, more) in zip(self._flats, self._cuts, strict=True):
            head = more * (least + row)
            if head:
                gradients.append(flat[:head].view(more, -1))
                places.append(rows[:more, begin : begin + least + row])
            if least:
                gradients.append(flat[head:].view(-1, least))
                places.append(rows[more:, begin : begin + least])
        return gradients, places

    def spread(self) -> None:
        """Give the ranks of this node each other's parts, and write all into the gradients."""
        gradients, places = self._pieces(self._nodes.all_rows(self._own))
        if places:
            torch._foreach_copy_(gradients, places)
        for view, flat in zip(self._views, self._flats, strict=True):
            if not view.is_contiguous():
                view.copy_(flat.view(view.shape))


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


def check_nodes(nodes: Any) -> None:
    """Raise ``ConfigError`` unless this is a value for the option ``nodes``."""
    if nodes in (None, "auto") if isinstance(nodes, str | None) else is_mesh(nodes):
        return
    if not is_whole(nodes) or nodes < 1:
        raise ConfigError(
            f"nodes={nodes!r}: pass the number of nodes, of equally many ranks each, nodes=2; or "
            'nodes="auto", which finds them; or a mesh of two dimensions, '
            "init_device_mesh(device, (nodes, ranks_per_node))"
        )


def nodes_of(nodes: Any, group: Any, device: torch.device, terms: Terms) -> Nodes | None:
    """Return this rank's place among nodes; ``None`` if each node has one rank, with nothing to
    share.  A collective of all ranks of ``group``, which also compares ``terms``.

    Args:
        nodes: as for :func:`check_nodes`.
        group: the process group that averages; ``None`` for the default one.  New groups have its
            library and its time-out.
        device: that of the gradients.

    Raises:
        ConfigError: nodes have different numbers of ranks, or a mesh has other ranks, or another
            order than ranks with the same shard in a column.
        MismatchError: the ranks differ in ``terms`` or nodes.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    text = str(nodes.mesh.tolist()) if is_mesh(nodes) else repr(nodes)
    agree({**terms, "nodes": text}, group)
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
        return Nodes(nodes.get_group(1), nodes.get_group(0)) if nodes.size(1) > 1 else None
    if nodes == "auto":
        # torchrun numbers nodes; other launchers do not.
        own = f"{os.environ.get('GROUP_RANK', '')} {socket.gethostname()}"
        hosts: list[Any] = [None] * len(ranks)
        dist.all_gather_object(hosts, own, group)
        by_host: dict[str, list[int]] = {}
        for rank, host in zip(ranks, hosts, strict=True):
            by_host.setdefault(host, []).append(rank)
        table = list(by_host.values())
    elif len(ranks) % nodes:
        raise ConfigError(
            f"nodes={nodes}: {len(ranks)} ranks are no {nodes} nodes of equally many ranks each"
        )
    else:
        of_a_node = len(ranks) // nodes
        table = [ranks[i : i + of_a_node] for i in range(0, len(ranks), of_a_node)]
    if len(sizes := {len(node) for node in table}) > 1:
        raise ConfigError(
            f'nodes="auto" found nodes of {" and ".join(map(str, sorted(sizes)))} ranks, and a '
            "rank's shard has its counterpart in each node: start as many ranks on every node, or "
            "leave nodes out"
        )
    if sizes == {1}:
        return None
    table = [sorted(node) for node in table]  # as the ranks of a group are
    here = next(node for node in table if dist.get_rank() in node)
    place = here.index(dist.get_rank())
    library = (group or dist.group.WORLD)._get_backend(device)
    timeout = getattr(getattr(library, "options", None), "_timeout", None)  # PyTorch may not say it
    options: dict[str, Any] = {"timeout": timeout, "backend": dist.get_backend(group)}
    members = here, [node[place] for node in table]
    return Nodes(
        *(dist.new_group(each, use_local_synchronization=True, **options) for each in members)
    )
