"""Direct exchange: every rank adds up one part, in rank order, and sends the sum to all.

Two rounds of P - 1 messages each, all in flight at once; every rank sends 2 n (P - 1) / P like a
ring.  The order of additions is that of the ranks for every element, so the result depends neither
on how arrays are cut or fused nor on timing, and it is that of the lockstep world, bit for bit.
Partial sums are never sent: half precisions are sent unchanged and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress.mpi.dense.algorithm import Allreduce
from hvd_compress.mpi.transport.communicator import Channel, others
from hvd_compress.mpi.transport.costs import Costs
from hvd_compress.mpi.transport.progress import Algorithm, Wait
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
    rank, peers = channel.rank, others(channel.rank, channel.size)
    # Ranks meet in the first round even if a part is empty, so that who is late is named.
    if parts is None:
        owners = list(range(channel.size))
    else:
        owners = [r for r, part in enumerate(parts) if part.stop > part.start]
    parts = shards_of(len(x), channel.size) if parts is None else parts
    sends = [peer for peer in peers if peer in owners]
    is_owner, length = rank in owners, parts[rank].stop - parts[rank].start
    arriving = {peer: reduction.scratch(length, wide=False) for peer in peers if is_owner}
    messages = [channel.receive(array, peer) for peer, array in arriving.items()]
    messages += [channel.send(x[parts[peer]], peer) for peer in sends]
    yield Wait(messages, phases[0])

    if is_owner:
        arriving[rank] = x[parts[rank]]
        total = reduction.scratch(length)
        reduction.widen(arriving[0], total)
        for peer in range(1, channel.size):
            reduction.combine(total, arriving[peer])
        del arriving[rank]
        reduction.give_back(*arriving.values())
        if reduce_across is not None and length:
            yield from reduce_across(total)
        reduction.finish(total, out[parts[rank]])
        reduction.give_back(total)

    messages = [channel.receive(out[parts[peer]], peer) for peer in sends]
    messages += [channel.send(out[parts[rank]], peer) for peer in (peers if is_owner else ())]
    yield Wait(messages, phases[1])


def _seconds(costs: Costs, n: int, p: int) -> float:
    """2 alpha + 2 (P-2) overhead + 2 n (P-1)/P beta_fan + n (P-1)/P gamma."""
    share = n * (p - 1) / p
    return 2 * costs.round_with_all(p) + 2 * share * costs.fan + share * costs.gamma


#: no partial sums are sent
ALGORITHM = Allreduce("direct", direct, lambda p: p, _seconds, half_factor=1.0)
