"""Columns: runs of elements with numbers of their own on the wire, as in 1-bit SGD."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar

import numpy as np

from hvd_compress.codecs import buckets
from hvd_compress.codecs.base import Codec
from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError

#: of columns: the levels of fewer elements would weigh more than their codes, and too many elements
#: for one rank to own would share theirs
_SHORTEST, _LONGEST = 64, 4096


class Columns(Codec):
    """Some numbers a column, its levels, and a code an element.

    On the wire all levels come first, column by column and in the dtype of the elements, then the
    codes of all elements.  Subclasses are dataclasses with the option ``column``, the number of
    elements in a column; the last column of an array is as long as it gets.
    """

    column: int | None

    #: numbers that are sent with each column
    levels: ClassVar[int]

    def _check_column(self) -> None:
        column = self.column
        if column is not None and (not is_whole(column) or column < 1):
            raise ConfigError(f"column must be a number of elements, or None; got {column!r}")

    @abc.abstractmethod
    def _code_size(self, n: int) -> int:
        """Bytes of the codes of ``n`` elements."""

    @abc.abstractmethod
    def _encode(self, x: np.ndarray, length: int) -> tuple[list[np.ndarray], np.ndarray]:
        """The levels of columns of ``length``, arrays of shape (columns, ``levels``) one after the
        other, and the bytes (uint8) of all codes."""

    @abc.abstractmethod
    def _decode(self, levels: np.ndarray, code: np.ndarray, n: int, length: int) -> np.ndarray:
        """``n`` numbers in columns of ``length``, from levels of shape (columns, ``levels``)."""

    def for_shape(self, shape: tuple[int, ...]) -> Columns:
        if self.column is not None:
            return self
        length = max(1, math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape))
        if length < _SHORTEST:
            length *= -(-_SHORTEST // length)
        parts = -(-length // _LONGEST)
        return dataclasses.replace(self, column=-(-length // parts))  # type: ignore[type-var]

    def unit(self, n: int) -> int:
        return self._length(n)

    def _length(self, n: int) -> int:
        return self.column or max(n, 1)

    def _bytes_of_levels(self, n: int, dtype: np.dtype) -> int:
        return buckets.count(n, self._length(n)) * self.levels * dtype.itemsize

    def size(self, n: int, dtype: np.dtype) -> int:
        return self._bytes_of_levels(n, dtype) + self._code_size(n)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        levels, codes = self._encode(x, self._length(x.size))
        head = np.concatenate(levels).astype(x.dtype.newbyteorder("<"))
        return np.concatenate([head.reshape(-1).view(np.uint8), codes])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        split = self._bytes_of_levels(n, dtype)
        levels = code[:split].view(dtype.newbyteorder("<")).astype(dtype).reshape(-1, self.levels)
        return self._decode(levels, code[split:], n, self._length(n))
