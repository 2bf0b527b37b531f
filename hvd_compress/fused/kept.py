"""Undo buffers: old states are kept in them while it is not known whether the new ones hold.

New states are written where the old ones are as soon as they are computed, in the pass over memory
that reads these.  The old ones are kept until the step is over: one state of each tensor where its
result will be written, which nobody needs before.  Other states are kept in memory that buckets
pass on to each other.  It suffices for one bucket at a time; a bucket that finds none writes its
states in a second pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import numpy as np

from hvd_compress.kernels import Column


class Spares:
    """Memory that buckets hand on to each other as long as there are any, for one at a time."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._is_taken = False
        self._lock = threading.Lock()

    def take(self, n: int) -> np.ndarray | None:
        """Return memory of at least ``n`` float32, ``None`` if another bucket has it."""
        with self._lock:
            if self._is_taken:
                return None
            if not self._free or self._free[0].size < n:
                self._free = [np.empty(n, np.float32)]
            self._is_taken = True
            return self._free.pop()

    def give(self, x: np.ndarray) -> None:
        """Take memory back."""
        with self._lock:
            self._free, self._is_taken = [x], False


_shared: weakref.ref[Spares] | None = None
_lock = threading.Lock()


def spares() -> Spares:
    """Return those of this process, which live as long as who holds them."""
    global _shared
    with _lock:
        found = None if _shared is None else _shared()
        if found is None:
            found = Spares()
            _shared = weakref.ref(found)
        return found


class Kept:
    """The old states of the tensors of a bucket in a step.

    Args:
        states: of each state, flat arrays in its memory, one a tensor.
        places: the same, where each is kept.
        columns: of these places.
        spare: the memory of all but the first, and the pool that it was taken from.

    Attributes:
        columns: see the argument.
        holds: the old states are there, and the new ones in their places.
    """

    def __init__(
        self,
        states: Sequence[Sequence[np.ndarray]],
        places: list[list[np.ndarray]],
        columns: list[Column],
        spare: tuple[Spares, np.ndarray] | None,
    ) -> None:
        self._states, self._places, self.columns, self._spare = states, places, columns, spare
        self.holds = False

    @classmethod
    def of(
        cls,
        states: Sequence[Sequence[np.ndarray]],
        out: list[np.ndarray],
        at_out: Column,
        pool: Spares,
    ) -> Kept | None:
        """Return where states are kept; ``None`` if there is no room.

        Args:
            states: of each state, flat arrays in its memory, one a tensor.
            out: arrays where results are written, ``at_out``; the first state is kept there.
            pool: has memory for the others.
        """
        if overlap(at_out):  # what is kept of one tensor would be another's gradient
            return None
        places, columns, spare, count = [out], [at_out], None, len(states) - 1
        if count:
            sizes = np.array(at_out.sizes)
            ends = np.cumsum(np.tile(sizes, count))
            if (memory := pool.take(int(ends[-1]))) is None:
                return None
            spare, starts = (pool, memory), memory.ctypes.data + 4 * (ends - np.tile(sizes, count))
            for i in range(count):
                own = slice(i * len(sizes), (i + 1) * len(sizes))
                first, last = ends[own.start] - sizes[0], ends[own.stop - 1]
                places.append(np.split(memory[first:last], ends[own][:-1] - first))
                columns.append(Column(places[-1], at_out.sizes, starts[own]))
        return cls(states, places, columns, spare)

    def put_back(self, tensors: Sequence[int] | None = None) -> None:
        """Write old states where they were, of some tensors or all."""
        for states, places in zip(self._states, self._places, strict=True):
            for i in range(len(states)) if tensors is None else tensors:
                np.copyto(states[i], places[i])

    def close(self) -> None:
        """Hand the memory on."""
        if self._spare is not None:
            pool, memory = self._spare
            self._spare = None
            pool.give(memory)


def overlap(column: Column) -> bool:
    """Return whether two arrays have memory in common."""
    order = np.argsort(column.addresses)
    starts, sizes = column.addresses[order], np.array(column.sizes)[order]
    return bool((starts[:-1] + 4 * sizes[:-1] > starts[1:]).any())
