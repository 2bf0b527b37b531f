"""Inputs and outputs of the loops over a bucket."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.errors import CompressionError

Array = Any

MOVED = (
    "the memory of a tensor was changed while it was being exchanged: change .data of gradients "
    "and states between optimizer.step() and loss.backward() only"
)


class Column:
    """An array of each tensor of a bucket, and where it is now: float32, contiguous, and of the
    tensor's size in any shape.

    An array is not its memory: between two steps, its owner may give it other memory, and free the
    old.  So a column is made again in each step.  One that is kept is compared with the places of
    its arrays before it is used again.

    Args:
        arrays: of one library, on one device.
        sizes: of the tensors; ``None`` takes those of the arrays.
        found: where they are, if that is known.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        sizes: Sequence[int] | None = None,
        found: np.ndarray | None = None,
    ) -> None:
        if sizes is None:
            sizes = [backend_of(x).size(x) for x in arrays]
        self.arrays, self.sizes = arrays, sizes
        if found is None and (found := addresses(arrays, sizes)) is None:
            raise CompressionError(MOVED)
        self.addresses = found

    def on_host(self) -> Column:
        return Column(self.flat_on_host(), self.sizes)

    def flat_on_host(self) -> list[np.ndarray]:
        """Return the same memory as flat arrays of NumPy, which keep it."""
        return backend_of(self.arrays[0]).flat_on_host(self.arrays)


def addresses(arrays: Sequence[Array], sizes: Sequence[int]) -> np.ndarray | None:
    """Return where float32 arrays of these sizes are (int64), which share a device and are
    contiguous; ``None`` if one is not such an array."""
    xp, device = backend_of(arrays[0]), getattr(arrays[0], "device", None)
    found = xp.addresses(arrays, sizes, "float32", device)
    return None if found is None else np.array(found, np.int64)


class Steps(NamedTuple):
    """The arrays of a bucket in one step: those that are read, and those where the new state is
    written, which may be the same.  Without momentum there are no velocities; without residuals
    either, elements are those of the gradients, and there is no new state.

    If there is memory to keep the old state in, the new one is written over it at once, which saves
    a second pass.  The residuals' may be the gradients', of
    which each element is read before."""

    gradients: Column
    residuals: Column | None = None
    new_residuals: Column | None = None
    velocities: Column | None = None
    new_velocities: Column | None = None
    kept_residuals: Column | None = None
    kept_velocities: Column | None = None

    @classmethod
    def of(cls, rows: Iterable[Sequence[Array]]) -> Steps:
        """Return the steps of tensors, given the arrays of each in the order above."""
        return cls(*(Column(list(column)) for column in zip(*rows, strict=True)))

    def on_host(self) -> Steps:
        on_host: list[Any] = [None if column is None else column.on_host() for column in self]
        return Steps(*on_host)

    def rows(self) -> Iterable[tuple[Array, Array, Array, Array, Array]]:
        """Return the first five arrays of each tensor in the order above, ``None`` for those that
        are not there."""
        return self._rows(self[:5])

    def kept(self) -> Iterable[tuple[Array, Array]]:
        """Return where each tensor's residual and velocity are kept, ``None`` for those that are
        not."""
        return self._rows(self[5:])

    def _rows(self, columns: Sequence[Column | None]) -> Iterable[Any]:
        nothing = [None] * len(self.gradients.arrays)
        return zip(*(nothing if x is None else x.arrays for x in columns), strict=True)

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the addresses of the arrays of each tensor (int64), and the number of elements of
        each.

        The order is gradient, velocity, residual, new velocity, new residual, and the places where
        the old velocity and residual are kept.  0 stands for those that are not there.
        """
        order = (0, 3, 1, 4, 2, 6, 5)
        tables = np.zeros((2, len(self.gradients.arrays), len(order)), np.int64)
        for i, place in enumerate(order):
            if (column := self[place]) is not None:
                tables[0, :, i], tables[1, :, i] = column.addresses, column.sizes
        return tables[0], tables[1]


#: of all tensors of a bucket, or of each; ``None``: there are no velocities
Momentum = float | Sequence[float] | None


def momenta_of(momentum: Momentum, count: int) -> np.ndarray:
    """Return the momentum of each of ``count`` tensors (float32)."""
    return np.broadcast_to(np.array(momentum or 0.0, np.float32), count).copy()


class Selected(NamedTuple):
    """The selected elements of all tensors of a bucket.

    Attributes:
        indices: ascending, into all tensors end to end (int64).
        values: float32.
        finite: for each tensor whether all its elements are finite (bool).
    """

    indices: np.ndarray
    values: np.ndarray
    finite: np.ndarray
