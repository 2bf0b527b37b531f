"""Sparse allreduce by an algorithm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hvd_compress.backends import backend_of
from hvd_compress.base import Sparse
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.meetings.sparse_vectors import take_in
from hvd_compress.mpi.collectives.sparse_messages import Format
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.progress import Algorithm


class Reduced(NamedTuple):
    """The result of a sparse allreduce.

    Attributes:
        total: the sum or mean, the same bits on all ranks: a ``Sparse`` of the dtype passed in.  If
            it is shorter, a flat array of all n elements.
        dropped: the entries that are not in ``total`` and that this rank has to keep, a ``Sparse``
            (float32 for float16).  Over all ranks, the vectors passed in add up to the sum, which
            is P times the mean, plus what was dropped.

    >>> from hvd_compress import Sparse
    >>> mine = Sparse(np.array([1, 3]), np.array([2.0, -1.0]))
    >>> sparse_allreduce(mine, n=4, comm=MPI.COMM_SELF).dense(4)
    array([ 0.,  2.,  0., -1.])
    """

    total: Any
    dropped: Sparse

    def dense(self, n: int) -> Any:
        """Return the total as a flat array of ``n`` elements: ``total`` itself if it is one."""
        if not isinstance(self.total, Sparse):
            if len(self.total) != n:
                raise ConfigError(f"n={n}, and the result has {len(self.total)} elements")
            return self.total
        xp = backend_of(self.total.values)
        return xp.put(xp.zeros(n, self.total.values), self.total.indices, self.total.values)


def prepare(
    sparse: Sparse,
    n: int,
    comm: Communicator,
    values: str | None,
    indices: str,
    op: str,
) -> tuple[Format, Sparse, Sparse, Any]:
    """Return the format of a call, the vector that the others receive of ``sparse``, its rounding
    errors, and the kind of the results.  The options are those of :class:`.Format`."""
    mine, like = take_in(sparse, n)
    dtype = mine.values.dtype.name
    values = dtype if values is None else values
    form = Format(int(n), dtype, values, indices, op, comm.size)
    brought, rounded_off = form.bring(mine)
    return form, brought, rounded_off, like


def run(comm: Communicator, call: str, start: Callable[[], Algorithm]) -> Any:
    """Agree on the call, and drive its algorithm to the end.

    A rank cannot answer a message that it could not read, so the communicator is of no use
    afterwards.
    """
    comm.agree(call)
    try:
        return comm.run(call, start())[0]
    except PayloadError as error:
        comm.give_up(f"{call}: {error}", [])
        raise
