"""The choice of the algorithm that a collective runs, by its name.

"auto" goes by a :class:`.CostModel`: a dense sum by its bytes, a sparse one by the largest number
of entries of a rank.  All ranks choose alike, since the model and these numbers are the same
everywhere.

A sum by way of nodes has a choice of its own across nodes, among the ranks that meet there.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.base import Sparse
from hvd_compress.config import check_choice
from hvd_compress.errors import PayloadError
from hvd_compress.mpi.dense import ALGORITHMS as DENSE
from hvd_compress.mpi.dense.algorithm import Allreduce
from hvd_compress.mpi.dense.hierarchical import hierarchical
from hvd_compress.mpi.sparse import ALGORITHMS as SPARSE
from hvd_compress.mpi.sparse.algorithm import Run, Summed
from hvd_compress.mpi.sparse.hierarchical import hierarchical as hierarchical_sparse
from hvd_compress.mpi.sparse.messages import Format
from hvd_compress.mpi.transport.arrays import HALVES
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.nodes import nodes_of
from hvd_compress.mpi.tuning.cost_model import CostModel
from hvd_compress.mpi.tuning.measuring import model_of
from hvd_compress.requests import algorithms

#: forms of calls whose number of entries a communicator remembers
_FORMS = 256


# -- dense -----------------------------------------------------------------------------------------


def dense(comm: Communicator, name: str, nbytes: int, dtype: str) -> Allreduce:
    """Return the allreduce of that name; for "auto" the fastest one for an array of ``nbytes``."""
    return DENSE[model_of(comm).fastest(nbytes, dtype) if name == "auto" else name]


def dense_by_nodes(
    comm: Communicator, name: str, nbytes: int, dtype: str, ranks_per_node: int | None = None
) -> Allreduce:
    """Return the allreduce inside nodes and, by that name, across them; on flat nodes
    :func:`dense`."""
    nodes, across = nodes_of(comm, ranks_per_node), DENSE["direct"]
    if nodes.is_flat:
        return dense(comm, name, nbytes, dtype)
    if nodes.across is not None:  # otherwise it is of no account here
        if dtype in HALVES:  # partial sums are float32
            nbytes, dtype = 2 * nbytes, "float32"
        across = dense(nodes.across, name, nbytes // nodes.owners, dtype)
        name = across.name
    return hierarchical(nodes, across, name)


def dense_of_exchange(comm: Communicator, name: str, nbytes: int, dtype: str) -> Allreduce:
    """Return the allreduce of a request.  Nodes add in the order of the ranks on both levels."""
    check_choice("algorithm", name, algorithms.SUMS)
    if name == "hierarchical":
        if not nodes_of(comm).is_flat:
            return dense_by_nodes(comm, "direct", nbytes, dtype)
        name = "auto"
    return dense(comm, name, nbytes, dtype)


# -- sparse ----------------------------------------------------------------------------------------


def sparse(comm: Communicator, name: str) -> Run:
    """Return the sparse sum of that name; for "auto" the one that would have been fastest in the
    last call of the same form."""
    return _fastest(model_of(comm), comm) if name == "auto" else SPARSE[name]


def sparse_by_nodes(comm: Communicator, name: str, ranks_per_node: int | None = None) -> Run:
    """Return the sparse sum inside nodes and, by that name, across them; on flat nodes
    :func:`sparse`."""
    nodes = nodes_of(comm, ranks_per_node)
    if nodes.is_flat:
        return sparse(comm, name)
    if name == "auto" and nodes.across is not None:
        return hierarchical_sparse(nodes, _fastest(model_of(nodes.across)))
    # On ranks that are not across it is of no account.
    return hierarchical_sparse(nodes, SPARSE["allgather" if name == "auto" else name])


def sparse_of_exchange(comm: Communicator, name: str) -> Run:
    """Return the sparse sum of a request; "auto" chooses by its own numbers of entries, since
    exchanges have the tags of one channel only."""
    check_choice("algorithm", name, algorithms.SPARSE_SUMS)
    if name == "hierarchical":
        if not nodes_of(comm).is_flat:
            return sparse_by_nodes(comm, "allgather")
        name = "auto"
    return _fastest(model_of(comm)) if name == "auto" else SPARSE[name]


def _fastest(model: CostModel, comm: Communicator | None = None) -> Run:
    """Return the function of the algorithm that is expected to be fastest for the largest number of
    entries of a rank.

    With ``comm`` that number is of the last call of the same form.  Ranks announce their entries
    while the algorithm runs, so that nothing waits for it.
    """

    def run(channel: Channel, mine: Sparse, form: Format) -> Summed:
        announcing = channel if comm is None else comm.channel()
        counts = np.full(channel.size, mine.indices.size, "<i8")
        own = counts[channel.rank : channel.rank + 1].copy()
        theirs = {peer: counts[peer : peer + 1] for peer in channel.comm.peers}
        arrival = announcing.exchange(theirs, dict.fromkeys(theirs, own), "numbers of entries")
        largest = None if comm is None else comm.entries.get(form)
        if largest is None:
            yield arrival
            largest = _largest(counts, form)
        try:
            result = yield from SPARSE[model.fastest_sparse(largest)](channel, mine, form)
        except BaseException as error:
            if not arrival.is_over:  # MPI still writes to ``counts``
                channel.comm.give_up(f"numbers of entries: {error!r}", [arrival])
            raise
        if comm is not None:
            if not arrival.is_over:
                yield arrival
            if len(comm.entries) >= _FORMS:
                comm.entries.clear()
            comm.entries[form] = _largest(counts, form)
        return result

    return run


def _largest(counts: np.ndarray, form: Format) -> int:
    k = int(counts.max())
    if not 0 <= k <= form.n:
        raise PayloadError(f"ranks announce {counts.tolist()} entries of {form.n}")
    return k
