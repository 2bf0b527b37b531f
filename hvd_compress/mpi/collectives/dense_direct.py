"""Direct exchange: every rank adds up one part, in rank order, and sends the sum to all.

Two rounds of P - 1 messages each, all in flight at once; every rank sends 2 n (P - 1) / P like a
ring.  Every element is added in the order of the ranks, so the result depends neither on how arrays
are cut or fused nor on timing.  It is that of the lockstep world, bit for bit.
Partial sums are never sent: half precisions are sent unchanged and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress.mpi.collectives.dense_algorithm import Allreduce
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.mpi.transport.reduction import Reduction
from hvd_compress.sharding import shards_of


def direct(
    channel: Channel,
    x: Any,
    out: Any,
    reduction: Reduction,
    parts: Sequence[slice] | None = None,
    reduce_across: Callable[[Any], Algorithm] | None = None,
    phases: tuple[str, str] = ("direct reduce-scatter", "direct allgather"),
) -> Algorithm:
    """Reduce the flat ``x`` into ``out``, which may be ``x``.

    Args:
        parts: which part each rank adds up; by default all have as much.
        reduce_across: adds up the partial results of a part with those of ranks elsewhere.
        phases: how time-outs call the two rounds.
    """
    rank, size, peers = channel.rank, channel.size, channel.peers
    # Ranks meet in the first round even if a part is empty, so that who is late is named.
    owners = peers
    if parts is not None:
        owners = [peer for peer in peers if parts[peer].stop > parts[peer].start]
    is_owner = parts is None or parts[rank].stop > parts[rank].start
    parts = shards_of(len(x), size) if parts is None else parts
    own = x[parts[rank]]
    arriving, leaving = {}, {}
    for peer in peers if is_owner else ():
        arriving[peer] = reduction.scratch(len(own), False)
    for peer in owners:
        leaving[peer] = x[parts[peer]]
    yield channel.exchange(arriving, leaving, phases[0])

    result = out[parts[rank]]
    if is_owner:
        total = reduction.scratch(len(own))
        reduction.widen(arriving[0] if rank else own, total)
        for peer in range(1, size):
            reduction.combine(total, own if peer == rank else arriving[peer])
        if reduce_across is not None and len(own):
            yield from reduce_across(total)
        reduction.finish(total, result)
        reduction.give_back(total, *arriving.values())

    returning = {}
    for peer in owners:
        returning[peer] = out[parts[peer]]
    results = dict.fromkeys(peers if is_owner else (), result)
    yield channel.exchange(returning, results, phases[1])


#: no partial sums are sent
ALGORITHM = Allreduce("direct", direct, lambda p: p, half_factor=1.0)
