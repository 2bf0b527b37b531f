"""Sums of vectors that are given by indices and values."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import Array, Output, backend_of
from hvd_compress.errors import UnsupportedError
from hvd_compress.requests.base import Collective, cut_at, require_alike
from hvd_compress.sharding import divided


class Sparse(NamedTuple):
    """``values`` at ascending unique ``indices`` (int32 or int64) of a flat array, both of shape
    (k,); zero elsewhere.

    >>> gradient = np.array([4.0, 1.0, 0.0, 2.0])
    >>> World(TopK(density=0.5), size=1).exchange([gradient])[0].sent
    Sparse(indices=array([0, 3]), values=array([4., 2.]))
    """

    indices: Array
    values: Array


class SparseTotal(NamedTuple):
    """The reply to a :class:`SparseSum`.

    Attributes:
        total: all n elements, flat, in the dtype of the values; the same bits on all ranks.
        dropped: this rank's entries that are not in the total; the rank keeps them.
        bytes_sent, bytes_received: bytes that this rank sent and received; ``None`` if the engine
            used no algorithm.

    >>> request = SparseSum(Sparse(np.array([1]), np.array([4.0])), n=3)
    >>> total = SparseSum.reply([request, request], rank=0)
    >>> total.total, total.dropped.indices.size
    (array([0., 8., 0.]), 0)
    """

    total: Array
    dropped: Sparse
    bytes_sent: int | None = None
    bytes_received: int | None = None


@dataclasses.dataclass(eq=False)
class SparseSum(Collective):
    """Sum flat arrays of ``n`` elements over the ranks, of which each rank gives the nonzero
    elements, ``sparse``.  The reply is a :class:`SparseTotal`.

    ``wire`` names the dtype of values on the wire if that is not their own: "float16".
    ``algorithm`` is one of the engine's; "auto" leaves it to the engine.

    >>> ranks = [SparseSum(Sparse(np.array([i]), np.array([4.0])), n=3) for i in (0, 2)]
    >>> SparseSum.reply(ranks, rank=0).total
    array([4., 0., 4.])
    """

    sparse: Sparse
    n: int
    wire: str | None = None
    algorithm: str = "auto"

    shared = ("wire", "algorithm")
    nbytes = 0  # the algorithm counts them

    def describe(self) -> str:
        return f"sparse sum of {self.n} by {self.algorithm}"

    def count(self, reply: Any, rank: int, size: int) -> tuple[Any, Any]:
        return reply.bytes_sent or 0, reply.bytes_received or 0

    @classmethod
    def join(cls, requests: Sequence[Any]) -> Any:
        xp, bounds = backend_of(requests[0].sparse.values), _bounds(requests)
        pairs = zip(requests, bounds, strict=False)
        together = Sparse(
            xp.concat([each.sparse.indices + start for each, start in pairs]),
            xp.concat([each.sparse.values for each in requests]),
        )
        return dataclasses.replace(requests[0], sparse=together, n=bounds[-1])

    @classmethod
    def cut(cls, requests: Sequence[Any], reply: Any, rank: int) -> list[Any]:
        like, bounds = requests[0].sparse.values, _bounds(requests)
        xp = backend_of(like)
        dropped = Sparse(xp.to_numpy(reply.dropped.indices), xp.to_numpy(reply.dropped.values))
        totals = cut_at(reply.total, [request.n for request in requests])
        found = []
        for (start, stop), total, own in zip(
            itertools.pairwise(bounds), totals, cut(dropped, bounds), strict=True
        ):
            # One algorithm for all: each has its share of the bytes by its elements.
            shares = [
                None if n is None else divided(n, bounds[-1], start, stop)
                for n in (reply.bytes_sent, reply.bytes_received)
            ]
            mine = Sparse(xp.from_numpy(own.indices, like), xp.from_numpy(own.values, like))
            found.append(SparseTotal(total, mine, *shares))
        return found

    @classmethod
    def reply(cls, requests: Sequence[Any], rank: int) -> Any:
        """Return the sum, added in the order of the ranks."""
        first, like = requests[0], requests[0].sparse
        looks = [(request.n, request.wire, request.algorithm) for request in requests]
        require_alike("ranks ask for sparse sums that differ in (n, wire, algorithm)", looks)
        xp = backend_of(like.values)
        total = xp.zeros(first.n, like.values)
        for indices, values in (request.sparse for request in requests):
            total = xp.add_at(total, indices, xp.round_to(values, first.wire))
        return SparseTotal(total, Sparse(like.indices[:0], like.values[:0]))

    @property
    def arrays(self) -> Sequence[Array]:
        return self.sparse

    def carrying(self, arrays: Sequence[Array]) -> Any:
        return dataclasses.replace(self, sparse=Sparse(*arrays))

    def outputs(self, rank: int, size: int) -> Output | list[Output]:
        raise UnsupportedError(
            f"algorithm={self.algorithm!r} adds entries while they travel, and a graph would have "
            "to know beforehand how many come out: leave algorithm out"
        )


def cut(x: Sparse, bounds: Sequence[int]) -> list[Sparse]:
    """Return the parts between consecutive ``bounds`` of a vector in host memory, with indices
    counted from the start of each."""
    at = np.searchsorted(x.indices, bounds)
    return [
        Sparse(x.indices[at[i] : at[i + 1]] - bounds[i], x.values[at[i] : at[i + 1]])
        for i in range(len(bounds) - 1)
    ]


def _bounds(requests: Sequence[SparseSum]) -> list[int]:
    return [0, *itertools.accumulate(request.n for request in requests)]
