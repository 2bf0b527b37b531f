"""Top-k between nodes, dense sums inside them: HiTopKComm (Shi et al., MLSys 2021)."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.coding.sparse_vectors import Vector, add_up
from hvd_compress.config import check_choice, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.operators import Selector, random_k
from hvd_compress.requests import Alltoall, Neighbors, Request
from hvd_compress.sharding import bounds_of
from hvd_compress.wire import decode, dense_is_shorter, encode_dense, encode_sparse
from hvd_compress.wire.frame import CODECS, decode_dense


@dataclasses.dataclass(frozen=True)
class nodes_top_k(Aggregator, name="nodes_top_k"):
    """Add up dense gradients inside each node, and send the largest sums between nodes.

    With L ranks on a node, in four steps:

    1. the ranks of a node send each other shards of n / L elements, and each adds up one;
    2. it selects the largest of these sums, and what it has kept of earlier steps;
    3. it exchanges them with the ranks that have the same shard on the other nodes, and adds all up
       in the order of the nodes;
    4. it sends the result to its node.

    Between nodes a rank sends k / L entries to each other node.  What was not selected stays with
    the rank that selects.

    State: ``owner_residual`` as of :class:`hvd_compress.blocks.alltoall`: sums over the node, as
    large as the tensor, zero outside the rank's own shard.

    Options:
        select: which sums are sent, an operator such as ``ms_top_k`` or ``top_k``, with a density.
        ranks_per_node: so many consecutive ranks make a node, as launchers number them; 1: every
            rank is a node.  If the number of ranks is no multiple of it, the last node has fewer,
            and the first rank of each node adds up everything.
        indices: on the wire, "packed" or "int32".

    Reference: Shi et al., MLSys 2021.

    Two nodes; each of their ranks owns two of the sums, and sends one:

    >>> world = World(chain(via=nodes_top_k(top_k(0.25), ranks_per_node=2)), size=4)
    >>> world.exchange([np.array([rank, 1.0, 8.0, rank]) for rank in range(4)])[0].mean
    array([1.25, 0.5 , 8.  , 0.  ])
    """

    select: Selector
    ranks_per_node: int = 1
    indices: str = "packed"

    keys = ("owner_residual",)

    def __post_init__(self) -> None:
        super().__post_init__()
        select = self.select
        if not isinstance(select, Selector) or isinstance(select, random_k) or select.keys:
            raise ConfigError(
                "nodes_top_k(select=...) takes an operator without a state, such as ms_top_k() or "
                f"top_k(); got {select!r}"
            )
        if not is_whole(self.ranks_per_node) or self.ranks_per_node < 1:
            raise ConfigError(
                f"ranks_per_node must be a number of ranks, 1 or more; got {self.ranks_per_node!r}"
            )
        check_choice("indices", self.indices, CODECS)

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        xp = backend_of(x)
        return {"owner_residual": xp.zeros(xp.size(x), x)}

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, dtype = xp.size(x), xp.dtype(x)
        node = _Node(n, dtype, context.rank, context.size, self.ranks_per_node, self.indices)
        length = node.stop - node.start

        frames = xp.on_host(
            node.split, [x, state["owner_residual"]], [("uint8", None)] * context.size, x
        )
        received = yield Alltoall(frames, equal_sizes=False)
        (region,) = xp.on_host(
            node.add_up, [state["owner_residual"], *received], [(dtype, length)], x
        )
        k = self.select.count(length, context)
        picked = self.select.select(region, k, context)
        frame, left = xp.on_host(node.keep, [region, picked], [("uint8", None), (dtype, n)], x)
        theirs = yield Neighbors(frame, node.peers, node.peers, equal_sizes=False)
        (frame,) = xp.on_host(node.merge, [frame, *theirs], [("uint8", None)], x)
        others = tuple(owner for owner in node.owners if owner != context.rank)
        mates = tuple(mate for mate in node.mates if mate != context.rank)
        targets = mates if context.rank in node.owners else ()
        theirs = yield Neighbors(frame, targets, others, equal_sizes=False)
        (total,) = xp.on_host(node.assemble, [frame, *theirs], [(dtype, n)], x)
        mean = xp.divided(total, context.size)
        return Aggregated(mean, x, xp.all_finite(mean), {"owner_residual": left})


class _Node:
    """What a rank computes on its host, and whom it talks to.

    Attributes:
        mates: all ranks of its node.
        owners: those of them that own a shard, in the order of the shards.
        peers: the owners of the same shard on other nodes; empty if it owns none.
        start, stop: of its own shard.
    """

    def __init__(
        self, n: int, dtype: str, rank: int, size: int, ranks_per_node: int, codec: str
    ) -> None:
        first = rank - rank % ranks_per_node
        self.mates = range(first, min(first + ranks_per_node, size))
        each = ranks_per_node if size % ranks_per_node == 0 else 1
        self.owners = self.mates[:each]
        place = rank - first
        starts = range(place, size, ranks_per_node) if place < each else range(0)
        self.peers = tuple(peer for peer in starts if peer != rank)
        self._earlier = sum(peer < rank for peer in self.peers)
        self.bounds = [*bounds_of(n, each), *[n] * (len(self.mates) - each)]
        self.start, self.stop = self.bounds[place], self.bounds[place + 1]
        self._n, self._rank, self._size = n, rank, size
        self._dtype, self._codec = dtype, codec

    def split(self, x: np.ndarray, residual: np.ndarray) -> list[np.ndarray]:
        """Return a frame for each rank: for an owner in this node its shard, for others nothing.

        What the rank keeps of shards that are not its own any more goes with them.
        """
        foreign = residual.copy()
        foreign[self.start : self.stop] = 0
        x = x + foreign if foreign.any() else x
        frames = [np.zeros(0, np.uint8)] * self._size
        for owner, a, b in zip(self.owners, self.bounds, self.bounds[1:], strict=False):
            frames[owner] = encode_dense(x[a:b])
        return frames

    def add_up(self, residual: np.ndarray, *frames: np.ndarray) -> list[np.ndarray]:
        """Return the sum of the rank's shard over its node, in the order of the ranks, and of what
        it has kept."""
        total = residual[self.start : self.stop].copy()
        if self._rank in self.owners:
            with np.errstate(over="ignore", invalid="ignore"):  # of a non-finite step
                for mate in self.mates:
                    sender = f"rank {mate}"
                    total += decode_dense(frames[mate], total.size, self._dtype, sender=sender)
        return [total]

    def keep(self, region: np.ndarray, picked: np.ndarray) -> list[np.ndarray]:
        """Return the frame of what was picked of the rank's shard, and what remains."""
        left = np.zeros(self._n, self._dtype)
        left[self.start : self.stop] = region
        left[self.start + picked] = 0
        return [encode_sparse(picked, region[picked], region.size, self._codec, self._n), left]

    def merge(self, own: np.ndarray, *theirs: np.ndarray) -> list[np.ndarray]:
        """Return the frame of the shard's sum over the nodes, added in their order."""
        if self._rank not in self.owners:
            return [own]
        length = self.stop - self.start
        frames, senders = list(theirs), list(self.peers)
        frames.insert(self._earlier, own)
        senders.insert(self._earlier, self._rank)
        parts = [self._read(f, length, s) for f, s in zip(frames, senders, strict=True)]

        def is_full(count: int) -> bool:
            return dense_is_shorter(count, length, self._dtype, self._codec)

        total = add_up(parts, length, self._dtype, is_full)
        if isinstance(total, Sparse):
            return [encode_sparse(*total, length, self._codec, self._n)]
        return [encode_dense(total, whole=self._n)]

    def assemble(self, own: np.ndarray, *theirs: np.ndarray) -> list[np.ndarray]:
        """Return the sum of all shards."""
        total, arriving = np.zeros(self._n, self._dtype), list(theirs)
        for owner, a, b in zip(self.owners, self.bounds, self.bounds[1:], strict=False):
            frame = own if owner == self._rank else arriving.pop(0)
            part = self._read(frame, b - a, owner)
            if isinstance(part, Sparse):
                total[a + part.indices] = part.values
            else:
                total[a:b] = part
        return [total]

    def _read(self, frame: np.ndarray, length: int, sender: int) -> Vector:
        indices, values = decode(frame, length, self._dtype, sender=f"rank {sender}", whole=self._n)
        values = values.astype(self._dtype)
        return values if indices is None else Sparse(indices.astype(np.int64), values)
