"""Dense allreduce of the users' arrays, in which the result is put if they say so."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.collectives.choosing import dense
from hvd_compress.mpi.collectives.dense import ALGORITHMS
from hvd_compress.mpi.collectives.dense_running import CHUNK, reducing
from hvd_compress.mpi.transport.arrays import Flat, describe, flatten
from hvd_compress.mpi.transport.communicator import Comm, Communicator
from hvd_compress.mpi.transport.nodes import suffix_of


def allreduce(
    x: Any,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Any = None,
    comm: Comm = None,
    nodes: bool | int = False,
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
        nodes: ``True`` reduces first inside each node and then, by the algorithm, between nodes,
            for clusters whose nodes run several ranks.  MPI says which ranks share memory; a number
            is that of the consecutive ranks of a node.
        chunk: the bytes of a message.  The array is sent in blocks, so that one is added while
            others are on the wire.  This takes a few chunks of memory in addition to the result.

    Returns:
        ``out``, or a new array of the kind of ``x``.

    >>> allreduce(np.array([1.0, 2.0]), op="mean", comm=MPI.COMM_SELF)
    array([1., 2.])
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
        if chunk < 64:
            raise ConfigError(f"chunk={chunk} bytes: at least 64")
        flat = flatten(x)
        target = _target_of(out, x, flat)
    call, way = f"allreduce({describe(flat)}, {op}", suffix_of(nodes)
    cut = "" if chunk == CHUNK else f", chunk={chunk}"
    communicator.agree(f"{call}, {communicator.named(algorithm)}{way}{cut})")
    chosen = dense(communicator, algorithm, flat.array.nbytes, flat.dtype, nodes)
    call = f"{call}, {chosen.name}{way})"
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
