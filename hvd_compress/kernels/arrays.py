"""What goes into the loops over a bucket, and what comes out of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of

Array = Any


class Column:
    """An array of each tensor of a bucket: float32, contiguous, and of the tensor's size in any
    shape.  Its addresses are looked up once, so who keeps arrays from step to step keeps a column.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = arrays

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        address = backend_of(self.arrays[0]).address
        return np.array([address(x) for x in self.arrays], np.int64)

    @functools.cached_property
    def sizes(self) -> list[int]:
        size = backend_of(self.arrays[0]).size
        return [size(x) for x in self.arrays]

    def on_host(self) -> Column:
        """Return the same memory as flat arrays of NumPy."""
        to_numpy = backend_of(self.arrays[0]).to_numpy
        return Column([to_numpy(x).reshape(-1) for x in self.arrays])


class Steps(NamedTuple):
    """The arrays of a bucket in one step: what is read, and where the new state is written.
    Without momentum there are no velocities."""

    gradients: Column
    residuals: Column
    new_residuals: Column
    velocities: Column | None = None
    new_velocities: Column | None = None

    @classmethod
    def of(cls, rows: Iterable[Sequence[Array]]) -> Steps:
        """Return the steps of tensors, given the arrays of each in the order above."""
        return cls(*(Column(list(column)) for column in zip(*rows, strict=True)))

    def on_host(self) -> Steps:
        """Return the same memory as flat arrays of NumPy."""
        on_host: list[Any] = [None if column is None else column.on_host() for column in self]
        return Steps(*on_host)

    def rows(self) -> Iterable[tuple[Array, Array, Array, Array, Array]]:
        """Return the arrays of each tensor in the order above, ``None`` for those that are not
        there."""
        nothing = [None] * len(self.gradients.arrays)
        columns = (nothing if column is None else column.arrays for column in self)
        return zip(*columns, strict=True)

    def table(self) -> np.ndarray:
        """Return the addresses of gradient, velocity, residual, new velocity and new residual of
        each tensor (int64, in this order), 0 for those that are not there."""
        order = (0, 3, 1, 4, 2)
        table = np.zeros((len(self.gradients.arrays), len(order)), np.int64)
        for i, place in enumerate(order):
            if (column := self[place]) is not None:
                table[:, i] = column.addresses
        return table


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
