"""Ring allreduce: reduce-scatter, then allgather, each rank talking to its two neighbours.

It takes 2 (P - 1) rounds.  Every rank sends 2 n (P - 1) / P, the minimum for an allreduce of n
bytes (Patarasuk and Yuan, 2009).  Every segment is added up on one path around the ring, so all
ranks hold the same bits.  The order of additions depends on the segment.
"""

from __future__ import annotations

from typing import Any

from hvd_compress.mpi.collectives.dense_algorithm import Allreduce
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.mpi.transport.reduction import Reduction
from hvd_compress.sharding import shards_of


def ring(channel: Channel, x: Any, out: Any, reduction: Reduction) -> Algorithm:
    """Reduce the flat ``x`` into ``out``, which may be ``x``."""
    rank, size = channel.rank, channel.size
    left, right = (rank - 1) % size, (rank + 1) % size
    parts = shards_of(len(x), size)
    largest = max(part.stop - part.start for part in parts)
    buffers = [reduction.scratch(largest), reduction.scratch(largest)]

    leaving = x[parts[rank]]
    if reduction.widens:
        leaving = buffers[0][: len(leaving)]
        reduction.widen(x[parts[rank]], leaving)
    mine = (rank + 1) % size
    for step in range(1, size):
        comes = parts[(rank - step) % size]
        arriving = buffers[step % 2][: comes.stop - comes.start]
        phase = "ring reduce-scatter"
        yield channel.exchange({left: arriving}, {right: leaving}, phase, (step, size - 1))
        if step < size - 1:
            reduction.combine(arriving, x[comes])
            leaving = arriving
        else:
            reduction.complete(arriving, x[comes], out[parts[mine]])
    reduction.give_back(*buffers)

    for step in range(1, size):
        arriving, leaving = out[parts[(mine - step) % size]], out[parts[(mine - step + 1) % size]]
        yield channel.exchange(
            {left: arriving}, {right: leaving}, "ring allgather", (step, size - 1)
        )


ALGORITHM = Allreduce("ring", ring, lambda p: p)
