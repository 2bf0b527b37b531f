"""Recursive doubling: partners at distance 1, 2, 4 ..., each time all of the data.

It takes log2 P rounds of one message out and one in, half as many as any algorithm that first adds
up parts.  Every rank sends n log2 P bytes: it is for small arrays (Thakur, Rabenseifner, Gropp,
2005).  If P is no power of two, the last ranks give their array to one of the first before.  They
get the result from it afterwards.

Both partners add the lower rank's partial sums to the higher one's, in this order and into other
memory.  So all ranks hold the same bits, whatever NaNs are in them.
"""

from __future__ import annotations

from typing import Any

from hvd_compress.mpi.dense.algorithm import Allreduce
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.mpi.transport.reduction import Reduction


def recursive_doubling(channel: Channel, x: Any, out: Any, reduction: Reduction) -> Algorithm:
    """Reduce the flat ``x`` into ``out``, which may be ``x``."""
    rank, n = channel.rank, len(x)
    rounds = channel.size.bit_length() - 1
    core, extra = 1 << rounds, channel.size - (1 << rounds)
    own, theirs, total = (reduction.scratch(n) for _ in range(3))
    reduction.widen(x, own)
    if rank >= core:
        yield channel.exchange({}, {rank - core: own}, "arrays of the last ranks")
        yield channel.exchange({rank - core: out}, {}, "results for the last ranks")
    else:
        if rank < extra:
            yield channel.exchange({rank + core: theirs}, {}, "arrays of the last ranks")
            reduction.add(own, theirs, total)
            own, total = total, own
        for step in range(rounds):
            peer = rank ^ (1 << step)
            yield channel.exchange(
                {peer: theirs}, {peer: own}, "recursive doubling", (step + 1, rounds)
            )
            reduction.add(*((own, theirs) if rank < peer else (theirs, own)), total)
            own, total = total, own
        reduction.finish(own, out)
        if rank < extra:
            yield channel.exchange({}, {rank + core: out}, "results for the last ranks")
    reduction.give_back(own, theirs, total)


ALGORITHM = Allreduce("recursive_doubling", recursive_doubling, lambda p: 1, half_factor=2.0)
