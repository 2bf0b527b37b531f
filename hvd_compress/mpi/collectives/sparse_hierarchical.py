"""Hierarchical sparse allreduce: entries are united inside each node before they go across.

Ranks that train on similar data select many of the same indices.  With L ranks on a node, such an
index is sent to the other nodes once instead of L times.  If all nodes have as many ranks, each
rank adds up a region of n / L elements.  It reduces that across nodes with the ranks that own the
same region, and all regions are gathered inside each node.  Otherwise the first rank of a node owns
all regions.  The sum is exact.

Differs from HiTopKComm (Shi et al., 2021), which adds up dense gradients inside the node and then
selects elements: here each rank selects before.
"""

from __future__ import annotations

from hvd_compress.base import Sparse
from hvd_compress.meetings.sparse_vectors import Vector, empty
from hvd_compress.mpi.collectives.sparse_messages import Format, Run, Summed, entries_of
from hvd_compress.mpi.collectives.sparse_split_allgather import assemble, from_owners, to_owners
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.nodes import ACROSS, INSIDE, Nodes
from hvd_compress.sharding import bounds_of


def hierarchical(nodes: Nodes, across: Run) -> Run:
    """Return the allreduce by way of ``nodes``, which are not flat; ``across`` adds up their
    sums."""

    def run(channel: Channel, mine: Sparse, form: Format) -> Summed:
        inside = channel.within(nodes.inside, INSIDE)
        bounds = bounds_of(form.n, nodes.owners) + [form.n] * (inside.size - nodes.owners)
        length = bounds[inside.rank + 1] - bounds[inside.rank]
        parts = yield from to_owners(inside, mine, bounds, form)

        done: Vector = empty(form.wire)
        lost = empty(form.wide)
        if nodes.across is not None:
            region = entries_of(form.add_up(parts, length, form.wide))
            between = channel.within(nodes.across, ACROSS)
            theirs = Format(length, form.wide, form.wide, form.codec, "sum", between.size)
            total, _ = yield from across(between, region, theirs)
            done, rounded_off = form.settle(total)
            if between.rank == 0:  # others have rounded the same sums
                start = bounds[inside.rank]
                lost = Sparse(rounded_off.indices + start, rounded_off.values)

        regions = yield from from_owners(inside, done, bounds, form)
        return assemble(regions, bounds, form), lost

    return run
