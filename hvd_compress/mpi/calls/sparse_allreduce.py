"""Sparse collectives: vectors given by the indices and values of their nonzero elements.

docs/sparse-collectives.md explains which of them to use.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from hvd_compress.base import Sparse
from hvd_compress.errors import PayloadError
from hvd_compress.meetings.sparse_vectors import give_back, take_in
from hvd_compress.mpi.sparse import ALGORITHMS
from hvd_compress.mpi.sparse.algorithm import Run, Summed
from hvd_compress.mpi.sparse.allgather import gather
from hvd_compress.mpi.sparse.hierarchical import hierarchical
from hvd_compress.mpi.sparse.messages import Format
from hvd_compress.mpi.sparse.running import Comm, Reduced, reduce, run
from hvd_compress.mpi.transport.communicator import Channel, Communicator, others
from hvd_compress.mpi.transport.nodes import nodes_of
from hvd_compress.mpi.transport.progress import Algorithm, InFlight, Wait
from hvd_compress.mpi.tuning.cost_model import CostModel
from hvd_compress.mpi.tuning.measuring import model_of

#: forms of calls whose number of entries a communicator remembers
_FORMS = 256


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

    Raises:
        ConfigError, UnsupportedError: an option or an array that does not fit.
        MismatchError: ranks differ in n, dtype or options.
        PayloadError: a message was damaged on its way.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        mine, like = take_in(sparse, n)
        form = Format.of(
            n,
            mine.values.dtype.name,
            values=values,
            indices=indices,
            op="sum",
            size=communicator.size,
        )
        brought, _ = form.bring(mine)
    lengths = [form.n] * communicator.size

    def start() -> Algorithm:
        return gather(communicator.channel(), brought, lengths, form, "sparse allgather")

    parts = run(communicator, f"sparse_allgather({form})", start)
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
        algorithm: "allgather", "recursive_doubling", "split_allgather", or "auto": what a model
            measured on this communicator expects to be fastest for the largest number of entries
            that a rank had in the last such call, or has if it is the first; see
            :class:`.CostModel`.
        values: a narrower dtype for values on the wire.  What rounding takes off is in
            ``dropped``, on the rank that rounded; otherwise ``dropped`` is empty.  Values too
            large for it become its largest number.

    float16 is added in float32 and rounded once.

    Raises:
        ConfigError, UnsupportedError: an option or an array that does not fit.
        MismatchError: ranks differ in n, dtype or options.
        PayloadError: a message was damaged on its way.
    """

    def choose(communicator: Communicator) -> Run:
        if algorithm == "auto":
            return _as_before(communicator, model_of(communicator))
        return ALGORITHMS[algorithm].run

    return reduce(sparse, n, op, algorithm, comm, values=values, indices=indices, choose=choose)


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

    def choose(communicator: Communicator) -> Run:
        nodes = nodes_of(communicator, ranks_per_node)
        ranks = communicator if nodes.is_flat else nodes.across
        if algorithm != "auto" or ranks is None:  # where nobody is across, it is of no account
            run = ALGORITHMS["allgather" if algorithm == "auto" else algorithm].run
        else:
            run = fastest(model_of(ranks))
        return run if nodes.is_flat else hierarchical(nodes, run)

    names = " across nodes" + ("" if ranks_per_node is None else f" of {ranks_per_node}")
    function = "hierarchical_sparse_allreduce"
    return reduce(
        sparse,
        n,
        op,
        algorithm,
        comm,
        indices=indices,
        choose=choose,
        function=function,
        nodes=names,
    )


def fastest(model: CostModel) -> Run:
    """Return what runs the algorithm that is expected to be fastest for the largest number of
    entries of a rank."""

    def run(channel: Channel, mine: Sparse, form: Format) -> Summed:
        announced = _Announced(channel, mine, form)
        yield from announced.arrive()
        return (yield from _chosen(model, announced.largest(), form)(channel, mine, form))

    return run


def _as_before(comm: Communicator, model: CostModel) -> Run:
    """Return what runs the algorithm that would have been fastest in the last call of this form:
    ranks announce how many entries they have while it runs, so that nothing waits for that."""

    def run(channel: Channel, mine: Sparse, form: Format) -> Summed:
        announced = _Announced(comm.channel(), mine, form)
        if (largest := comm.entries.get(form)) is None:
            yield from announced.arrive()
            largest = announced.largest()
        result = yield from _chosen(model, largest, form)(channel, mine, form)
        yield from announced.arrive()
        if len(comm.entries) >= _FORMS:
            comm.entries.clear()
        comm.entries[form] = announced.largest()
        return result

    return run


def _chosen(model: CostModel, k: int, form: Format) -> Run:
    pair, item = form.bytes_per_entry(k), np.dtype(form.wire).itemsize
    return ALGORITHMS[model.fastest_sparse(k, form.n, pair=pair, item=item)].run


class _Announced:
    """How many entries each rank has, as every rank tells every other."""

    def __init__(self, channel: Channel, mine: Sparse, form: Format) -> None:
        self._counts, self._n = np.full(channel.size, mine.indices.size, "<i8"), form.n
        own = self._counts[channel.rank : channel.rank + 1].copy()
        self._messages: list[InFlight] = []
        for peer in others(channel.rank, channel.size):
            self._messages.append(channel.receive(self._counts[peer : peer + 1], peer))
            self._messages.append(channel.send(own, peer))

    def arrive(self) -> Generator[Wait, None, None]:
        messages, self._messages = self._messages, []
        if messages:
            yield Wait(messages, "numbers of entries")

    def largest(self) -> int:
        k = int(self._counts.max())
        if not 0 <= k <= self._n:
            raise PayloadError(f"ranks announce {self._counts.tolist()} entries of {self._n}")
        return k
