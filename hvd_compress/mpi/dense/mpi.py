"""MPI's own allreduce, with the interface and the time-out of the other algorithms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from mpi4py.util.dtlib import to_numpy_dtype

from hvd_compress.mpi.dense.algorithm import Allreduce
from hvd_compress.mpi.transport.arrays import before_message
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.progress import Algorithm, complete
from hvd_compress.mpi.transport.reduction import Reduction


def _maximum(incoming: Any, result: Any, datatype: MPI.Datatype) -> None:
    """Take the element-wise maximum into ``result``.  MPICH's own MPI.MAX loses a NaN."""
    dtype = to_numpy_dtype(datatype)
    x, y = np.frombuffer(incoming, dtype), np.frombuffer(result, dtype)
    np.maximum(x, y, out=y)


@functools.cache
def _op(name: str) -> MPI.Op:
    """Return MPI's operation, which is made when it is needed: MPI may be initialised after the
    import."""
    return MPI.Op.Create(_maximum, commute=True) if name == "max" else MPI.SUM


def native(channel: Channel, x: Any, out: Any, reduction: Reduction) -> Algorithm:
    """Reduce the flat ``x`` into ``out``, which may be ``x``.

    The non-blocking form is used, since nothing ends a blocking call whose partner has gone.  MPI
    knows no half precisions: they are added as float32.  ``x`` is copied rather than reduced in
    place, for which Open MPI takes an algorithm that is several times slower.
    """
    source, total = x, out
    if reduction.widens or x is out:
        source = reduction.scratch(len(x))
        reduction.widen(x, source)
    if reduction.widens:
        total = reduction.scratch(len(x))
    for array in (source, total):
        before_message(array)
    request = channel.comm.mpi.Iallreduce(source, total, _op(reduction.op))
    yield from channel.comm.collective(request, f"{channel.place}MPI_Iallreduce")
    if reduction.widens or reduction.op == "mean":
        reduction.finish(total, out)


def at_once(
    comm: Communicator, x: np.ndarray, out: np.ndarray, op: str, call: Callable[[], object]
) -> None:
    """Reduce an array as it is, with next to nothing around MPI's call.

    Args:
        x, out: contiguous, alike, and the same or apart; of a dtype that MPI knows.
        op: "sum", "mean" or "max".
        comm, call: see :func:`.complete`.
    """
    comm.check()
    source = x.copy() if x is out else x  # which must outlive the call
    request = comm.mpi.Iallreduce(source, out, _op(op))
    complete(comm, request, "MPI_Iallreduce", call)
    del source
    if op == "mean":
        np.divide(out, comm.size, out=out)


#: MPI cuts its messages itself: a block is long, since each is a call
ALGORITHM = Allreduce("mpi", native, lambda p: 16, half_factor=2.0)
