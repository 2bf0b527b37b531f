"""Dense allreduce of the users' arrays, in which the result is put if they say so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.dense import ALGORITHMS
from hvd_compress.mpi.dense.algorithm import Allreduce
from hvd_compress.mpi.dense.running import CHUNK, reducing
from hvd_compress.mpi.transport.arrays import Flat, describe, flatten
from hvd_compress.mpi.transport.communicator import Comm, Communicator
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
    """Reduce an array over all ranks; every rank gets the same bits.

    Args:
        x: a NumPy array, a torch tensor, or a GPU array with DLPack, of one shape; float16,
            bfloat16, float32, float64 or integers.  Half precisions are added in float32 and
            rounded once.  No gradient passes: what autograd has computed is refused.
        op: "sum", "mean" (floats only) or "max" (NaN counts as largest).
        algorithm: "ring", "halving_doubling", "direct", or "auto": the one
            that was fastest when it was measured on this communicator, see :class:`.CostModel`.
        out: the array for the result, of the shape and dtype of ``x``; ``out=x`` works in place,
            and ``None`` makes a new array.
        comm: an ``MPI.Comm`` or a :class:`Communicator`; ``None`` for all ranks.
        chunk: the bytes of a message.  The array is sent in blocks, so that one is added while
            others are on the wire.  This takes a few chunks of memory in addition to the result.

    Returns:
        ``out``, or a new array of the kind of ``x``.

    >>> allreduce(np.array([1.0, 2.0]), op="mean", comm=MPI.COMM_SELF)
    array([1., 2.])
    """

    return _reduce(x, op, algorithm, out, comm, chunk, "allreduce", "", dense)


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
        algorithm: between nodes: one of those of :func:`allreduce`.
        ranks_per_node: the number of consecutive ranks that make a node; ``None`` asks MPI which
            ranks share memory.  A number smaller than the ranks of a machine splits the machine.
    """

    choose = functools.partial(dense_by_nodes, ranks_per_node=ranks_per_node)
    function, nodes = "hierarchical_allreduce", suffix_of(ranks_per_node)
    return _reduce(x, op, algorithm, out, comm, chunk, function, nodes, choose)


def _reduce(
    x: Any,
    op: str,
    algorithm: str,
    out: Any,
    comm: Comm,
    chunk: int,
    function: str,
    nodes: str,
    choose: Callable[[Communicator, str, int, str], Allreduce],
) -> Any:
    """Reduce an array over all ranks.

    Args:
        function, nodes: the name of the function that was called, and the nodes that it goes by
            way of as text, for messages.
        choose: returns the algorithm, given its name, the bytes and the dtype, when all ranks have
            agreed on the call.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
        if chunk < 64:
            raise ConfigError(f"chunk={chunk} bytes: at least 64")
        flat = flatten(x)
        target = _target_of(out, x, flat)
    call, cut = f"{function}({describe(flat)}, {op}", "" if chunk == CHUNK else f", chunk={chunk}"
    communicator.agree(f"{call}, {communicator.named(algorithm)}{nodes}{cut})")
    chosen = choose(communicator, algorithm, flat.array.nbytes, flat.dtype)
    call = f"{call}, {chosen.name}{nodes})"
    reducing(communicator, call, chosen, flat.array, flat.dtype, target.array, op, chunk).wait()
    done = target.give_back(target.array)
    return done if out is None else _assign(out, done)


def _target_of(out: Any, x: Any, flat: Flat) -> Flat:
    """Return the array that the result is made in, ``out`` itself if that is possible; ``flat`` is
    ``x`` flat.

    Raises:
        ConfigError: ``out`` cannot be written, or differs from ``x`` in shape or dtype.
    """
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ConfigError("out is read-only: pass an array that can be written, or out=None")
    if out is x:
        return flat
    if out is not None:
        target = flatten(out)
        if (target.dtype, target.shape) != (flat.dtype, flat.shape):
            raise ConfigError(
                f"out is {describe(target)} and x is {describe(flat)}: they must be alike"
            )
        if len(flat.array) and target.array.ctypes.data == flat.array.ctypes.data:
            return flat  # a view of the whole of x is x
        if not np.may_share_memory(target.array, flat.array):
            return target
    return flat._replace(array=np.empty_like(flat.array))


def _assign(out: Any, done: Any) -> Any:
    """Put the result into ``out``, unless it was made there."""
    if isinstance(out, np.ndarray):
        if not np.may_share_memory(out, done):
            out[...] = done
    elif out.data_ptr() != done.data_ptr():
        out.detach().copy_(done)
    return out
