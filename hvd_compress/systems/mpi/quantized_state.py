"""The state of a quantised allreduce between calls, and the columns of an array."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.integrations.checkpoints import check_array, entry, refused, whole
from hvd_compress.mpi.transport.arrays import Flat, describe
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.sharding import shards_of

#: more than there will ever be
MOST_RANKS = 1 << 24
#: elements in a column of arrays that have no columns of their own
BLOCK = 2048


class Plan(NamedTuple):
    """The positions of the columns of an array in its flat form."""

    shape: tuple[int, ...]
    n: int
    length: int  # of a column; the last one may be shorter
    is_last: bool

    @classmethod
    def of(cls, shape: tuple[int, ...], columns: str | int) -> Plan:
        n, is_last = math.prod(shape), False
        if is_whole(columns) and columns > 0:
            length = columns
        elif columns not in ("first", "last"):
            raise ConfigError(
                f'columns={columns!r}: write "first", "last", or the number of elements in a column'
            )
        elif len(shape) < 2:
            length = BLOCK
        else:
            is_last = columns == "last"
            length = n // max(1, shape[-1] if is_last else shape[0])
        return cls(shape, n, max(1, length), is_last)

    def flatten(self, x: np.ndarray) -> np.ndarray:
        """Return ``x`` flat, column after column; a view if the array lies that way."""
        return (np.moveaxis(x, -1, 0) if self.is_last else x).reshape(-1)

    def restore(self, flat: np.ndarray) -> np.ndarray:
        """Return a view of the flat array in the shape of the array."""
        if self.is_last:
            return np.moveaxis(flat.reshape(self.shape[-1:] + self.shape[:-1]), 0, -1)
        return flat.reshape(self.shape)

    def shards(self, ranks: int) -> list[slice]:
        """Return each rank's elements."""
        return shards_of(self.n, ranks, self.length)


@dataclasses.dataclass
class QuantizedState:
    """The residuals of one array on one rank.

    Make an empty state for each array, ``QuantizedState()``, and keep it.  The first call makes the
    residuals, and only calls that succeed change them.

    Attributes:
        worker: the part of the rank's own arrays that was not sent, in the shape of the array;
            float64 for float64, otherwise float32.
        owner: the part of the *sum* over the ranks (also with ``op="mean"``) that was not sent, for
            this rank's shard: 1-D.
        columns, rank, size: the values that the shard depends on.

    When the number of ranks changes, the shards change with it, and :func:`quantized_allreduce`
    refuses a state that has an owner's residual.  It belongs to the sum, to which every rank's
    residual is added in the end; so it may as well wait in a worker's residual.  :meth:`fold` puts
    it into this rank's, and needs no other rank: enough where ranks drop out and the others go on.
    :func:`consolidate` is for checkpoints that one rank writes and all read.

    >>> state = QuantizedState()
    >>> x = np.array([1.0, 2.0, 4.0, -1.0])
    >>> mean = quantized_allreduce(x, state, comm=MPI.COMM_SELF)
    >>> mean.round(3), state.worker.round(3)  # what is sent in one bit, and what waits
    (array([ 2.333,  2.333,  2.333, -1.   ]), array([-1.333, -0.333,  1.667,  0.   ]))
    """

    worker: np.ndarray | None = None
    owner: np.ndarray | None = None
    columns: str | int = "first"
    rank: int = 0
    size: int = 1

    def fold(self) -> None:
        """Move the owner's residual into the worker's, where it has the same effect."""
        if self.worker is not None and self.owner is not None:
            plan = Plan.of(self.worker.shape, self.columns)
            flat = plan.flatten(self.worker).copy()
            flat[plan.shards(self.size)[self.rank]] += self.owner
            self.worker = plan.restore(flat)
        self.owner = None

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the arrays by name, and the values that they depend on."""
        values = vars(self)
        return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: something is missing, damaged or does not fit; then nothing has changed.
        """
        names = [field.name for field in dataclasses.fields(self)]
        if not isinstance(state, Mapping) or set(state) != set(names):
            found = ", ".join(map(str, state)) if isinstance(state, Mapping) else repr(state)
            raise refused(f"it has {found} where {', '.join(names)} were expected")
        rank, size = whole(state, "rank"), whole(state, "size", 1)
        if rank >= size:
            raise refused(f"it is that of rank {rank} of {size}")
        worker = entry(state, "worker", (np.ndarray, type(None)))
        owner = entry(state, "owner", (np.ndarray, type(None)))
        plan = Plan.of(() if worker is None else worker.shape, state["columns"])
        if worker is not None:
            check_array("'worker'", worker)
        if owner is not None:
            if size > MOST_RANKS:
                raise refused(f"'size' is {size}, and there are never so many ranks")
            shard = plan.shards(size)[rank]
            check_array("'owner'", owner, None if worker is None else shard.stop - shard.start)
            if owner.ndim != 1:
                raise refused(f"'owner' has {owner.ndim} dimensions where 1 was expected")
        for name, value in state.items():
            setattr(self, name, value.copy() if isinstance(value, np.ndarray) else value)

    def prepare(
        self, flat: Flat, dtype: np.dtype, columns: str | int, comm: Communicator, plan: Plan
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the residuals ``(worker, owner)`` for this array on these ranks."""
        if self.worker is None:
            self.worker = np.zeros(flat.shape, dtype)
        if (self.worker.shape, self.worker.dtype) != (flat.shape, dtype):
            raise ConfigError(
                f"state is for an array of {self.worker.dtype}{list(self.worker.shape)} and x is "
                f"{describe(flat)}: keep one QuantizedState for each array"
            )
        theirs, ours = (self.columns, self.rank, self.size), (columns, comm.rank, comm.size)
        if self.owner is not None and theirs != ours:
            raise ConfigError(
                "state has shards of columns={!r} for rank {} of {}".format(*theirs)
                + ", and this call has columns={!r} on rank {} of {}".format(*ours)
                + ": call consolidate(state) before the ranks change, or state.fold() on each"
            )
        if self.owner is None:
            shard = plan.shards(comm.size)[comm.rank]
            self.owner = np.zeros(shard.stop - shard.start, dtype)
            self.columns, self.rank, self.size = ours
        return self.worker, self.owner
