"""The choice of the algorithm that a collective runs, by its name.

"auto" goes by a :class:`.CostModel`: a dense sum by its bytes, a sparse one by the largest number
of entries of a rank.  All ranks choose alike, since the model and these numbers are the same
everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import TypeVar

import numpy as np

from hvd_compress.base import Sparse
from hvd_compress.config import check_choice
from hvd_compress.errors import PayloadError
from hvd_compress.mpi.collectives.cost_model import CostModel
from hvd_compress.mpi.collectives.dense import ALGORITHMS as DENSE
from hvd_compress.mpi.collectives.dense_algorithm import Allreduce
from hvd_compress.mpi.collectives.dense_hierarchical import hierarchical
from hvd_compress.mpi.collectives.measuring import model_of
from hvd_compress.mpi.collectives.sparse import ALGORITHMS as SPARSE
from hvd_compress.mpi.collectives.sparse_hierarchical import hierarchical as hierarchical_sparse
from hvd_compress.mpi.collectives.sparse_messages import Format, Run, Summed
from hvd_compress.mpi.transport.arrays import HALVES
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.nodes import nodes_of
from hvd_compress.mpi.transport.progress import Wait
from hvd_compress.requests import algorithms

T = TypeVar("T")


def alone(comm: Communicator, choose: Callable[[], T]) -> Generator[Wait, None, T]:
    """Return what ``choose`` returns, which may wait for other ranks.

    Other exchanges move on meanwhile.  One that comes to a choice of its own waits for this one.
    Another rank may make that choice first, and ranks would wait for each other in two of them.
    """
    while comm.is_choosing:
        yield Wait([], [], "choosing an algorithm")
    comm.is_choosing = True
    try:
        return choose()
    finally:
        comm.is_choosing = False


# -- dense -----------------------------------------------------------------------------------------


def dense(
    comm: Communicator, name: str, nbytes: int, dtype: str, nodes: bool | int = False
) -> Allreduce:
    """Return the allreduce of that name; for "auto" the fastest one for an array of ``nbytes``.
    With ``nodes``, see :func:`.nodes_of`, it is that inside nodes and, by that name, across."""
    found = None if nodes is False else nodes_of(comm, nodes)
    if found is not None and not found.is_flat:
        if dtype in HALVES:  # partial sums are float32
            nbytes, dtype = 2 * nbytes, "float32"
        return hierarchical(found, dense(comm, name, nbytes // found.owners, dtype))
    return DENSE[model_of(comm).fastest(nbytes, dtype) if name == "auto" else name]


def dense_of_exchange(comm: Communicator, name: str, nbytes: int, dtype: str) -> Allreduce:
    """Return the allreduce of a request.  Nodes add in the order of the ranks on both levels."""
    check_choice("algorithm", name, algorithms.SUMS)
    if name != "hierarchical":
        return dense(comm, name, nbytes, dtype)
    across = "auto" if nodes_of(comm).is_flat else "direct"
    return dense(comm, across, nbytes, dtype, nodes=True)


# -- sparse ----------------------------------------------------------------------------------------


def sparse(comm: Communicator, name: str, nodes: bool | int = False) -> Run:
    """Return the sparse sum of that name; for "auto" the fastest one for the entries that the ranks
    announce.  With ``nodes`` it is that inside nodes and, by that name, across."""
    found = None if nodes is False else nodes_of(comm, nodes)
    if found is not None and not found.is_flat:
        return hierarchical_sparse(found, sparse(comm, name))
    return functools.partial(_fastest, model_of(comm)) if name == "auto" else SPARSE[name]


def sparse_of_exchange(comm: Communicator, name: str) -> Run:
    """Return the sparse sum of a request."""
    check_choice("algorithm", name, algorithms.SPARSE_SUMS)
    if name != "hierarchical":
        return sparse(comm, name)
    across = "auto" if nodes_of(comm).is_flat else "allgather"
    return sparse(comm, across, nodes=True)


def _fastest(model: CostModel, channel: Channel, mine: Sparse, form: Format) -> Summed:
    """Run the algorithm that is expected to be fastest for the largest number of entries of a
    rank."""
    counts = np.full(channel.size, mine.indices.size, "<i8")
    own = counts[channel.rank : channel.rank + 1].copy()
    theirs = {peer: counts[peer : peer + 1] for peer in channel.peers}
    yield channel.exchange(theirs, dict.fromkeys(theirs, own), "numbers of entries")
    k = int(counts.max())
    if not 0 <= k <= form.n:
        raise PayloadError(f"ranks announce {counts.tolist()} entries of {form.n}")
    return (yield from SPARSE[model.fastest_sparse(k)](channel, mine, form))
