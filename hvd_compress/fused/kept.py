"""Undo buffers: old states are kept in them while it is not known whether the new ones hold.

New states are written where the old ones are as soon as they are computed, in the pass over memory
that reads these.  The old ones are kept until the step is over: one state of each tensor where its
result will be written, which nobody needs before.  Other states are kept in memory that buckets
pass on to each other.  It suffices for one bucket at a time; a bucket that finds none writes its
states in a second pass.
"""

from __future__ import annotations

import itertools
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

    Attributes:
        columns: where each state is kept.
        holds: the old states are there, and the new ones in their places.
    """

    def __init__(self, states: Sequence[Sequence[np.ndarray]], columns: list[Column]) -> None:
        self._states, self.columns = states, columns
        self.holds = False
        self._spare: tuple[Spares, np.ndarray] | None = None

    @classmethod
    def of(
        cls, states: Sequence[Sequence[np.ndarray]], out: Sequence[np.ndarray], pool: Spares
    ) -> Kept | None:
        """Return where states are kept; ``None`` if there is no room.

        Args:
            states: of each state, flat arrays in its memory, one per tensor.
            out: arrays where results are written; the first state is kept there.
            pool: has memory for the others.
        """
        first, *others = states
        sizes = [x.size for x in first]
        kept = cls(states, [Column(out, sizes)])
        if overlap(kept.columns[0]):  # what is kept of one tensor would be another's gradient
            return None
        if not others:
            return kept
        bounds = np.cumsum([0, *sizes]).tolist()
        if (memory := pool.take(len(others) * bounds[-1])) is None:
            return None
        kept._spare = pool, memory
        for i in range(len(others)):
            own = memory[i * bounds[-1] :]
            parts = [own[a:b] for a, b in itertools.pairwise(bounds)]
            kept.columns.append(Column(parts, sizes))
        return kept

    def put_back(self, tensors: Sequence[int] | None = None) -> None:
        """Write old states where they were, of some tensors or all."""
        for states, column in zip(self._states, self.columns, strict=True):
            for i in range(len(states)) if tensors is None else tensors:
                np.copyto(states[i], column.arrays[i])

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
