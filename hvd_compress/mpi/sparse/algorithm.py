"""The description of an algorithm of a sparse allreduce."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from hvd_compress.base import Sparse
from hvd_compress.meetings.sparse_vectors import Vector
from hvd_compress.mpi.sparse.messages import Format
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.progress import Wait

#: what an algorithm returns: the result, and what rounding took off on this rank
Summed = Generator[Wait, None, tuple[Vector, Sparse]]
#: ``run(channel, mine, form)``
Run = Callable[[Channel, Sparse, Format], Summed]


class EntryCount(NamedTuple):
    """``k`` of ``n`` elements on each rank, at places that are independent between ranks.  An index
    with its value takes ``pair`` bytes, a dense value ``item``."""

    k: int
    n: int
    pair: float
    item: int

    def union(self, ranks: int) -> float:
        """Return the number of different places of all ranks, given their number."""
        return self.n * (1 - (1 - self.k / self.n) ** ranks) if self.n else 0.0

    def message(self, ranks: int) -> float:
        return min(self.pair * self.union(ranks), self.item * self.n)


@dataclasses.dataclass(frozen=True)
class SparseAllreduce:
    """An algorithm that loses nothing; one module has one, as ``ALGORITHM``, and its name.

    Attributes:
        name: by which users choose it.
        run: adds up, over a channel and in the format of a call.
        seconds: those on P ranks, 2 or more, by a :class:`.CostModel` of rounds, bytes and entries.
    """

    name: str
    run: Run
    seconds: Callable[[Any, EntryCount, int], float]
