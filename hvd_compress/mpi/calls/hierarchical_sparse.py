"""Hierarchical sparse allreduce: entries are united inside each node before they go across.

Ranks that train on similar data select many of the same indices.  With L ranks on a node, such an
index is sent to the other nodes once instead of L times.  If all nodes have as many ranks, each
rank adds up a region of n / L elements, reduces it across nodes with the ranks that own the same
region, and all regions are gathered inside each node; otherwise the first rank of a node owns all
regions.  The sum is exact.

Differs from HiTopKComm (Shi et al., 2021), which adds
up dense gradients inside the node and then selects elements: here each rank selects before.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from hvd_compress.base import Sparse
from hvd_compress.config import check_choice
from hvd_compress.meetings.sparse_vectors import Vector, empty, take_in
from hvd_compress.mpi.calls.sparse_allreduce import fastest, sparse_allreduce
from hvd_compress.mpi.sparse import ALGORITHMS
from hvd_compress.mpi.sparse.messages import Format
from hvd_compress.mpi.sparse.running import Comm, Reduced, reduced, run
from hvd_compress.mpi.sparse.split_allgather import assemble, from_owners, to_owners
from hvd_compress.mpi.transport.communicator import Channel, Communicator
from hvd_compress.mpi.transport.nodes import Nodes, named, nodes_of
from hvd_compress.mpi.transport.progress import Algorithm, Wait
from hvd_compress.mpi.tuning.cost_model import CostModel
from hvd_compress.mpi.tuning.measuring import model_of
from hvd_compress.sharding import bounds_of


def hierarchical_sparse_allreduce(
    sparse: Sparse,
    n: int,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    comm: Comm = None,
    ranks_per_node: int | None = None,
    indices: str = "int32",
) -> Reduced:
    """Run :func:`sparse_allreduce` first inside each node and then between nodes.  On one node, or
    with one rank per node, it is the same as :func:`sparse_allreduce`.

    Args:
        sparse, n, op, comm, indices: as for :func:`sparse_allreduce`.
        algorithm: between nodes: "allgather", "recursive_doubling", "split_allgather" or "auto".
        ranks_per_node: see :func:`hierarchical_allreduce`.

    float16 is added in float32 on both levels and rounded once; ``dropped`` is empty.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
        mine, like = take_in(sparse, n)
        dtype = mine.values.dtype.name
        form = Format.of(
            n, dtype, indices=indices, op=op, size=communicator.size, may_be_dense=True
        )
    name = f"{communicator.named(algorithm)} across nodes"
    name += f" of {ranks_per_node}" if ranks_per_node is not None else ""
    call = f"hierarchical_sparse_allreduce({form}, {name})"
    communicator.agree(call)
    nodes = nodes_of(communicator, ranks_per_node)
    if nodes.is_flat:
        return sparse_allreduce(
            sparse, n, op=op, algorithm=algorithm, comm=communicator, indices=indices
        )

    model = None
    if algorithm == "auto" and nodes.across is not None:
        model = model_of(nodes.across)

    def start() -> Algorithm:
        assert nodes.inside is not None
        across = None if nodes.across is None else nodes.across.channel()
        return by_nodes(
            nodes, nodes.inside.channel(), across, mine, form, algorithm=algorithm, model=model
        )

    return reduced(form, run(communicator, call, start), [], like)


def by_nodes(
    nodes: Nodes,
    inside: Channel,
    across: Channel | None,
    mine: Sparse,
    form: Format,
    *,
    algorithm: str,
    model: CostModel | None = None,
) -> Generator[Wait, None, Vector]:
    """Return the sum; ``across`` is ``None`` on ranks that do not send to other nodes."""
    owners = inside.size if nodes.is_even else 1
    bounds = bounds_of(form.n, owners) + [form.n] * (inside.size - owners)
    length = bounds[inside.rank + 1] - bounds[inside.rank]
    parts = yield from named("inside the node", to_owners(inside, mine, bounds, form))

    done: Vector = empty(form.dtype)
    if across is not None:
        region = form.add_up(parts, length, form.wide)
        if not isinstance(region, Sparse):
            places = np.flatnonzero(region)
            region = Sparse(places, region[places])
        between = Format.of(
            length, form.wide, indices=form.codec, op="sum", size=across.size, may_be_dense=True
        )
        if model is not None:
            algorithm_across = fastest(across, region, between, model)
        else:
            algorithm_across = ALGORITHMS[algorithm].run(across, region, between)
        total, _ = yield from named("across nodes", algorithm_across)
        done, _ = form.settle(total)

    regions = yield from named("inside the node", from_owners(inside, done, bounds, form))
    return assemble(regions, bounds, form)
