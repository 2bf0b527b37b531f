"""Hierarchical allreduce: inside each node, then across nodes, then inside again.

The network between nodes is slower than memory, so as little as possible is sent over it.  All
ranks of a node share the work (Goyal et al., 2017, also reduce inside the node first).  With L
ranks on each of N nodes and n bytes:

- Even nodes reduce-scatter inside, so that each rank has a part of n / L elements.  It reduces that
  across nodes with the ranks that have the same part there.  An allgather inside ends it.  Every
  rank sends 2 n / L (N - 1) / N bytes across and 2 n (L - 1) / L inside.
- With uneven nodes the first rank of a node adds up the whole array.  It reduces that with the
  first ranks of the other nodes, and sends the result to its node.

Inside a node sums are made in the order of the ranks.  Half precisions are added in float32 on both
levels, sent between nodes as float32, and rounded once at the end.
"""

from __future__ import annotations

from typing import Any

from hvd_compress.mpi.collectives.dense_algorithm import Allreduce
from hvd_compress.mpi.collectives.dense_direct import direct
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.nodes import ACROSS, INSIDE, Nodes
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.mpi.transport.reduction import Reduction

_EVEN, _UNEVEN = ("reduce-scatter", "allgather"), ("reduce", "broadcast")


def hierarchical(nodes: Nodes, across: Allreduce) -> Allreduce:
    """Return the allreduce by way of ``nodes``, which are not flat; ``across`` adds up their
    partial results."""

    def run(channel: Channel, x: Any, out: Any, reduction: Reduction) -> Algorithm:
        between = None if nodes.across is None else channel.within(nodes.across, ACROSS)

        def reduce_across(partial: Any) -> Algorithm:
            assert between is not None
            # The division of a mean is left to the end.
            op = "sum" if reduction.op == "mean" else reduction.op
            dtype = "float32" if reduction.widens else reduction.dtype
            reduce = Reduction(op, dtype, between.size)
            return across.run(between, partial, partial, reduce)

        inside = channel.within(nodes.inside, INSIDE)
        # The first rank of an uneven node adds up all.
        rest = (inside.size - 1) * [slice(len(x), len(x))]
        parts = None if nodes.is_even else [slice(0, len(x)), *rest]
        phases = _EVEN if nodes.is_even else _UNEVEN
        return direct(inside, x, out, reduction, parts, reduce_across, phases)

    return Allreduce(across.name, run, lambda p: len(nodes.members) * nodes.owners)
