"""Codecs with a scale for each run of elements: a bucket, or a column of a matrix."""

from __future__ import annotations

import abc
import dataclasses
import math

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.config import numbers
from hvd_compress.kernels.bitpacking import digits_size, pack_digits, unpack_digits
from hvd_compress.kernels.codecs import Digits, Loops
from hvd_compress.kernels.reference import sums

#: how large a run is, as a number
NORMS = ("l2", "max")


check_bucket = numbers(
    "a number of elements, or None for all", lambda n: n >= 1, whole=True, optional=True
)
check_column = numbers("a number of elements, or None", lambda n: n >= 1, whole=True, optional=True)


def count(n: int, bucket: int | None) -> int:
    """Return how many buckets ``n`` elements have, of which the last may be shorter."""
    return (1 if n else 0) if bucket is None else -(-n // bucket)


def rows(x: np.ndarray, bucket: int | None) -> list[np.ndarray]:
    """Return views of a flat array with a bucket in each row: those of full length, and the shorter
    one at the end, if any."""
    length = bucket or max(x.size, 1)
    full = x.size // length * length
    parts = [x[:full].reshape(-1, length)]
    return parts if full == x.size else [*parts, x[full:].reshape(1, -1)]


def norms(x: np.ndarray, bucket: int | None, norm: str) -> np.ndarray:
    """Return the norm of every bucket, in the dtype of ``x``; sums are made in float64."""
    found = []
    for part in rows(x, bucket):
        if norm == "max":
            found.append(np.abs(part).max(axis=1, initial=0))
        else:
            found.append(np.sqrt(sums(np.square(part, dtype=np.float64))))
    with np.errstate(over="ignore"):
        return np.concatenate(found).astype(x.dtype)


def per_element(scales: np.ndarray, n: int, bucket: int | None) -> np.ndarray:
    """Return the scale of each of ``n`` elements, or an array of length 1 if they share one."""
    return scales[:1] if bucket is None else np.repeat(scales, bucket)[:n]


#: the means or scales of fewer elements would weigh more than their codes, and too many elements
#: for one rank to own would share theirs
_SHORTEST, _LONGEST = 64, 4096


class ByColumn(Codec):
    """The base of codecs with the option ``column``, the number of elements in a column.  The last
    column of an array may be shorter."""

    column: int | None

    def for_shape(self, shape: tuple[int, ...]) -> ByColumn:
        if self.column is not None:
            return self
        length = max(1, math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape))
        if length < _SHORTEST:
            length *= -(-_SHORTEST // length)
        parts = -(-length // _LONGEST)
        return dataclasses.replace(self, column=-(-length // parts))  # type: ignore[type-var]

    def unit(self, n: int) -> int:
        return self.column or max(n, 1)


class Scaled(Codec):
    """A codec is a grid, a scale for each run of elements, and a rounding to the grid.

    On the wire all scales come first, in the dtype of the elements, then the digits of all
    elements.
    """

    @property
    @abc.abstractmethod
    def _grid(self) -> Digits:
        """The runs, how their scales are made, and the numbers that digits stand for."""

    @abc.abstractmethod
    def _rounded(
        self, x: np.ndarray, scales: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        """The digits (unsigned) of elements, given the scale of each, or of all of them."""

    def _scales(self, x: np.ndarray) -> np.ndarray:
        return norms(x, self._grid.length, "l2" if self._grid.l2 else "max")

    def _heads(self, n: int) -> int:
        return count(n, self._grid.length)

    @property
    def _loops(self) -> Loops | None:
        return self._grid if self._grid.base <= 256 else None

    def unit(self, n: int) -> int:
        return self._grid.length or 1

    def size(self, n: int, dtype: np.dtype) -> int:
        return self._heads(n) * dtype.itemsize + digits_size(n, self._grid.base)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        scales = self._scales(x)
        each = per_element(scales, x.size, self._grid.length)
        digits = pack_digits(self._rounded(x, each, random), self._grid.base)
        return np.concatenate([scales.astype(x.dtype.newbyteorder("<")).view(np.uint8), digits])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        grid, split = self._grid, self._heads(n) * dtype.itemsize
        scales = code[:split].view(dtype.newbyteorder("<")).astype(dtype)
        digits = unpack_digits(code[split:], n, grid.base)
        if grid.table is None:
            values = digits.astype(dtype) - grid.zero
        else:
            values = grid.table.astype(dtype)[digits]
        with np.errstate(invalid="ignore", over="ignore"):
            return values * per_element(scales / grid.unit, n, grid.length)
