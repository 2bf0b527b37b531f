"""Sparse collectives: vectors given by the indices and values of their nonzero elements.

docs/sparse-collectives.md explains which of them to use.
"""

from __future__ import annotations

from hvd_compress.base import Sparse
from hvd_compress.config import check_choice
from hvd_compress.meetings.sparse_vectors import give_back
from hvd_compress.mpi.collectives import choosing
from hvd_compress.mpi.collectives.sparse import ALGORITHMS
from hvd_compress.mpi.collectives.sparse_allgather import gather
from hvd_compress.mpi.collectives.sparse_messages import entries_of
from hvd_compress.mpi.collectives.sparse_running import Reduced, prepare, run
from hvd_compress.mpi.transport.communicator import Comm, Communicator
from hvd_compress.mpi.transport.nodes import suffix_of
from hvd_compress.mpi.transport.progress import Algorithm


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
    nodes: bool | int = False,
    values: str | None = None,
    indices: str = "int32",
) -> Reduced:
    """Return the exact sum or mean of the ranks' sparse vectors; all ranks get the same bits.

    Args:
        sparse, n, comm, indices: as for :func:`sparse_allgather`.
        op: "sum" or "mean".
        algorithm: "allgather", "split_allgather", or "auto": the one that was fastest when it was
            measured on this communicator (:class:`.CostModel`).  The largest number of entries of a
            rank counts.
        nodes: as for :func:`allreduce`.
        values: a narrower dtype for values on the wire.  Rounding errors are in ``dropped``, on the
            rank that rounded; otherwise ``dropped`` is empty.  Values too large for it become its
            largest number.

    float16 is added in float32 and rounded once.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
        form, brought, rounded_off, like = prepare(sparse, n, communicator, values, indices, op)

    def start() -> Algorithm:
        add_up = choosing.sparse(communicator, algorithm, nodes)
        return add_up(communicator.channel(), brought, form)

    call = f"sparse_allreduce({form}, {communicator.named(algorithm)}{suffix_of(nodes)})"
    total, lost = run(communicator, call, start)
    dropped = form.not_sent([rounded_off, lost])
    return Reduced(give_back(form.present(total), like), give_back(dropped, like))
