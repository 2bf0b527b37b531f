"""Dense allreduce: one function for each algorithm, and one that chooses."""

from __future__ import annotations

import functools
from typing import Any

from hvd_compress.mpi.dense.running import CHUNK, run
from hvd_compress.mpi.transport.communicator import Comm
from hvd_compress.mpi.transport.nodes import suffix_of
from hvd_compress.mpi.tuning.choosing import dense, dense_by_nodes


def allreduce(
    x: Any,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Any = None,
    comm: Comm = None,
    chunk: int = CHUNK,
) -> Any:
    """Reduce an array over all ranks, which get the same bits; only NaNs may differ in theirs where
    MPI's own allreduce adds up.

    Args:
        x: a NumPy array, a torch tensor, or a GPU array with DLPack, of one shape; float16,
            bfloat16, float32, float64 or integers.  Half precisions are added in float32 and
            rounded once.  No gradient passes: what autograd has computed is refused.
        op: "sum", "mean" (floats only) or "max" (NaN counts as largest).
        algorithm: "ring", "halving_doubling", "recursive_doubling", "direct", "mpi" (MPI's own), or
            "auto": the one that the measured :class:`.CostModel` expects to be fastest.
        out: the array for the result, of the shape and dtype of ``x``, which it may be; ``None``
            makes a new one.
        comm: an ``MPI.Comm`` or a :class:`Communicator`; ``None`` for all ranks.
        chunk: the bytes of a message.  The array is sent in blocks, so that one is added while
            others are on the wire.  This takes a few chunks of memory in addition to the result.

    Returns:
        ``out``, or a new array of the kind of ``x``.

    >>> allreduce(np.array([1.0, 2.0]), op="mean", comm=MPI.COMM_SELF)
    array([1., 2.])
    """

    return run(x, op, algorithm, out, comm, chunk=chunk, choose=dense)


def hierarchical_allreduce(
    x: Any,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Any = None,
    comm: Comm = None,
    ranks_per_node: int | None = None,
    chunk: int = CHUNK,
) -> Any:
    """Reduce an array first inside each node and then between nodes, for clusters whose nodes run
    several ranks.

    If all ranks share one node, or each has its own, this is the same as :func:`allreduce`.

    Args:
        x, op, out, comm, chunk: as for :func:`allreduce`.
        algorithm: between nodes: "ring", "halving_doubling", "direct", "mpi", or "auto".
        ranks_per_node: the number of consecutive ranks that make a node; ``None`` asks MPI which
            ranks share memory.  A number smaller than the ranks of a machine splits the machine.
    """

    choose = functools.partial(dense_by_nodes, ranks_per_node=ranks_per_node)
    nodes = suffix_of(ranks_per_node)
    return run(x, op, algorithm, out, comm, chunk=chunk, choose=choose, nodes=nodes)


def ring_allreduce(
    x: Any, *, op: str = "sum", out: Any = None, comm: Comm = None, chunk: int = CHUNK
) -> Any:
    """Run :func:`allreduce` around a ring: 2 (P - 1) rounds, each rank sends 2 n (P - 1) / P bytes.

    The order of additions of an element depends on its place in the array.

    Args:
        x, op, out, comm, chunk: as for :func:`allreduce`, whose errors these are, too.
    """
    return allreduce(x, op=op, algorithm="ring", out=out, comm=comm, chunk=chunk)


def halving_doubling_allreduce(
    x: Any, *, op: str = "sum", out: Any = None, comm: Comm = None, chunk: int = CHUNK
) -> Any:
    """Run :func:`allreduce` by recursive halving and doubling: 2 log2 P rounds.

    Args:
        x, op, out, comm, chunk: as for :func:`allreduce`, whose errors these are, too.
    """
    return allreduce(x, op=op, algorithm="halving_doubling", out=out, comm=comm, chunk=chunk)


def recursive_doubling_allreduce(
    x: Any, *, op: str = "sum", out: Any = None, comm: Comm = None, chunk: int = CHUNK
) -> Any:
    """Run :func:`allreduce` by recursive doubling: log2 P rounds, each rank sends n log2 P bytes;
    elements are always added in the same order.

    Args:
        x, op, out, comm, chunk: as for :func:`allreduce`, whose errors these are, too.
    """
    return allreduce(x, op=op, algorithm="recursive_doubling", out=out, comm=comm, chunk=chunk)


def direct_allreduce(
    x: Any, *, op: str = "sum", out: Any = None, comm: Comm = None, chunk: int = CHUNK
) -> Any:
    """Run :func:`allreduce` with two rounds of messages from each rank to each other; elements are
    always added in the order of the ranks.

    Args:
        x, op, out, comm, chunk: as for :func:`allreduce`, whose errors these are, too.
    """
    return allreduce(x, op=op, algorithm="direct", out=out, comm=comm, chunk=chunk)
