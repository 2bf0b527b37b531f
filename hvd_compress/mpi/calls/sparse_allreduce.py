"""Sparse collectives: vectors given by the indices and values of their nonzero elements.

docs/sparse-collectives.md explains which of them to use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from hvd_compress.base import Sparse
from hvd_compress.config import check_choice
from hvd_compress.meetings.sparse_vectors import give_back
from hvd_compress.mpi.sparse import ALGORITHMS
from hvd_compress.mpi.sparse.algorithm import Run
from hvd_compress.mpi.sparse.allgather import gather
from hvd_compress.mpi.sparse.messages import entries_of
from hvd_compress.mpi.sparse.running import Reduced, prepare, run
from hvd_compress.mpi.transport.communicator import Comm, Communicator
from hvd_compress.mpi.transport.nodes import suffix_of
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.mpi.tuning import choosing


def sparse_allgather(
    sparse: Sparse,
    n: int,
    *,
    comm: Comm = None,
    values: str | None = None,
    indices: str = "int32",
) -> list[Sparse]:
    """Return every rank's entries, in rank order; all ranks get the same bits.

    Args:
        sparse: ascending unique indices within 0..n-1 and as many values, float16, float32 or
            float64, in NumPy arrays or torch tensors.  Ranks may have different numbers of
            entries, and none.
        n: elements of the flat tensor, the same on all ranks.
        comm: ``None`` for all ranks.
        values: a narrower dtype for the values on the wire; the result holds the rounded values
            in their own dtype, this rank's as well.
        indices: on the wire: "int32" (int64 in tensors of more than 2^31 elements), or "packed",
            about log2(n / k) + 1.5 bits each.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        form, brought, _, like = prepare(sparse, n, communicator, values, indices, "sum")
    lengths = [form.n] * communicator.size

    def start() -> Algorithm:
        return gather(communicator.channel(), brought, lengths, form, "sparse allgather")

    parts = map(entries_of, run(communicator, f"sparse_allgather({form})", start))
    return [give_back(Sparse(part.indices, part.values.astype(form.dtype)), like) for part in parts]


def sparse_allreduce(
    sparse: Sparse,
    n: int,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    comm: Comm = None,
    values: str | None = None,
    indices: str = "int32",
) -> Reduced:
    """Return the exact sum or mean of the ranks' sparse vectors; all ranks get the same bits.

    Args:
        sparse, n, comm, indices: as for :func:`sparse_allgather`.
        op: "sum" or "mean".
        algorithm: "allgather", "split_allgather", or "auto": the one
            that was fastest when it was measured on this communicator (:class:`.CostModel`).  The
            largest number of entries of a rank counts.
        values: a narrower dtype for values on the wire.  Rounding errors are in ``dropped``, on the
            rank that rounded; otherwise ``dropped`` is empty.  Values too large for it become its
            largest number.

    float16 is added in float32 and rounded once.
    """

    function, choose = "sparse_allreduce", choosing.sparse
    return _reduce(sparse, n, op, algorithm, comm, values, indices, function, "", choose)


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
        algorithm: between nodes: "allgather", "split_allgather" or "auto".
        ranks_per_node: see :func:`hierarchical_allreduce`.

    float16 is added in float32 on both levels and rounded once; ``dropped`` is empty.
    """

    choose = functools.partial(choosing.sparse_by_nodes, ranks_per_node=ranks_per_node)
    function, nodes = "hierarchical_sparse_allreduce", suffix_of(ranks_per_node)
    return _reduce(sparse, n, op, algorithm, comm, None, indices, function, nodes, choose)


def _reduce(
    sparse: Sparse,
    n: int,
    op: str,
    algorithm: str,
    comm: Comm,
    values: str | None,
    indices: str,
    function: str,
    nodes: str,
    choose: Callable[[Communicator, str], Run],
) -> Reduced:
    """Reduce a vector over all ranks.

    Args:
        function, nodes: the name of the function that was called, and the nodes that it goes by
            way of as text, for messages.
        choose: returns what adds up by the name, when all ranks have agreed on the call.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
        form, brought, rounded_off, like = prepare(sparse, n, communicator, values, indices, op)

    def start() -> Algorithm:
        return choose(communicator, algorithm)(communicator.channel(), brought, form)

    call = f"{function}({form}, {communicator.named(algorithm)}{nodes})"
    total, lost = run(communicator, call, start)
    dropped = form.not_sent([rounded_off, lost])
    return Reduced(give_back(form.present(total), like), give_back(dropped, like))
