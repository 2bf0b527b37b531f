"""A scale for each run of elements, and a digit for each element."""

from __future__ import annotations

import abc

import numpy as np

from hvd_compress.codecs import buckets
from hvd_compress.codecs.base import Codec
from hvd_compress.kernels.bitpacking import digits_size, pack_digits, unpack_digits
from hvd_compress.kernels.codecs import Digits, Loops


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
        """A number a run, in the dtype of ``x``."""
        return buckets.norms(x, self._grid.length, "l2" if self._grid.l2 else "max")

    def _heads(self, n: int) -> int:
        """The number of scales that are sent."""
        return buckets.count(n, self._grid.length)

    @property
    def _loops(self) -> Loops | None:
        return self._grid if self._grid.base <= 256 else None

    def unit(self, n: int) -> int:
        return self._grid.length or 1

    def size(self, n: int, dtype: np.dtype) -> int:
        return self._heads(n) * dtype.itemsize + digits_size(n, self._grid.base)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        scales = self._scales(x)
        each = buckets.per_element(scales, x.size, self._grid.length)
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
            return values * buckets.per_element(scales / grid.unit, n, grid.length)
