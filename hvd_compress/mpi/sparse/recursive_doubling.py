"""Recursive doubling for sparse vectors: SparCML's SSAR_Recursive_double (Renggli et al., SC 2019).

In round s of log2 P, rank r exchanges its vector with rank r XOR 2^s, and both add.  Vectors grow
with the union of their indices, from k to at most P k entries.  A vector is sent dense as soon as
that is shorter, and each message says whether it is sparse or dense.

Differs from the paper in the number of ranks, which may be any.  The first P - 2^m ranks add the
vectors of the last P - 2^m before, and send them the result afterwards.  The lower rank's vector is
the first operand of every addition.  So all ranks hold the same bits, whatever NaNs are in them.
"""

from __future__ import annotations

import operator

from hvd_compress.base import Sparse
from hvd_compress.meetings.sparse_vectors import Vector, empty
from hvd_compress.mpi.sparse.algorithm import Summed
from hvd_compress.mpi.sparse.messages import Format, most_bytes, with_values
from hvd_compress.mpi.transport.channel import Channel, exchange


def recursive_doubling(channel: Channel, mine: Sparse, form: Format) -> Summed:
    """Return the result, and what rounding it took off: nothing, since partial sums are not
    rounded."""
    rank, n = channel.rank, form.n
    rounds = channel.size.bit_length() - 1
    core, extra = 1 << rounds, channel.size - (1 << rounds)
    total: Vector = mine
    sent_as = form.wire  # until the first addition

    if extra:
        outgoing = {rank - core: form.encode(total, n)} if rank >= core else {}
        sources = [rank + core] if rank < extra else []
        limit, phase = most_bytes(n, sent_as), "vectors of the last ranks"
        folded = yield from exchange(channel, outgoing, sources, phase, limit=limit)
        if rank < extra:
            parts = [mine, form.decode(folded[rank + core], n, sent_as, rank + core)]
            total = form.add_up(parts, n, form.wide)
        sent_as = form.wide
    if rank < core:
        for step in range(rounds):
            peer = rank ^ (1 << step)
            total = with_values(total, operator.methodcaller("astype", sent_as, copy=False))
            frame = form.encode(total, n)
            limit, place = most_bytes(n, sent_as), (step + 1, rounds)
            frames = yield from exchange(
                channel, {peer: frame}, [peer], "recursive doubling", place, limit=limit
            )
            theirs = form.decode(frames[peer], n, sent_as, peer)
            ordered = [total, theirs] if rank < peer else [theirs, total]
            total = form.add_up(ordered, n, form.wide)
            sent_as = form.wide
        total = form.result(total)
    if not extra:
        return total, empty(form.wide)

    back = {rank + core: form.encode(total, n)} if rank < extra else {}
    sources = [rank - core] if rank >= core else []
    limit = most_bytes(n, form.dtype)
    frames = yield from exchange(channel, back, sources, "result to the last ranks", limit=limit)
    for source, frame in frames.items():
        total = form.decode(frame, n, form.dtype, source)
    return total, empty(form.wide)
