"""One bit an element and two means a column, as in 1-bit SGD (Seide et al., Interspeech 2014)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from hvd_compress.codecs.base import Classes, Codec
from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.operators import one_bit as columns_of_bits

#: of columns: means of fewer elements would weigh more than their bits, and too many elements for
#: one rank to own would follow two means
_SHORTEST, _LONGEST = 64, 4096


@dataclasses.dataclass(frozen=True)
class column_means(Codec, name="column_means"):
    """The negative elements of a column become their mean, all others theirs.

    Sent: a bit an element and two means a column.

    Options:
        column: elements of a column, a run of the flat tensor.  ``None`` takes what belongs to one
            index of the first dimension: in PyTorch a row of a matrix, or a filter, that is, what
            comes together in one output; in Keras what leaves one input (of a convolution: one row
            of the kernel).  One-dimensional tensors are one column.  Columns of fewer than 64
            elements are joined, and those of more than 4096 divided.  Short columns follow each
            other more closely, long ones take fewer bits: 32 c / (c + 64) times less than float32.
    """

    column: int | None = None

    def __post_init__(self) -> None:
        column = self.column
        if column is not None and (not is_whole(column) or column < 1):
            raise ConfigError(f"column must be a number of elements, or None; got {column!r}")

    def for_shape(self, shape: tuple[int, ...]) -> column_means:
        if self.column is not None:
            return self
        length = max(1, math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape))
        if length < _SHORTEST:
            length *= -(-_SHORTEST // length)
        parts = -(-length // _LONGEST)
        return column_means(-(-length // parts))

    def unit(self, n: int) -> int:
        return self._length(n)

    def _length(self, n: int) -> int:
        return self.column or max(n, 1)

    def _levels(self, n: int) -> int:
        return -(-n // self._length(n)) * columns_of_bits.LEVELS

    def size(self, n: int, dtype: np.dtype) -> int:
        return self._levels(n) * dtype.itemsize + columns_of_bits.code_bytes(n)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        levels, codes = columns_of_bits.encode(x, self._length(x.size))
        head = levels.astype(x.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
        return np.concatenate([head, codes])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        split = self._levels(n) * dtype.itemsize
        levels = code[:split].view(dtype.newbyteorder("<")).astype(dtype)
        levels = levels.reshape(-1, columns_of_bits.LEVELS)
        return columns_of_bits.decode(levels, code[split:], n, self._length(n))

    def classes(self, d: int) -> Classes:
        """The two means are a projection, and never worse than one mean of magnitudes."""
        d = min(d, self._length(d))
        return Classes(1 / d, 1.0, 1 / d, float(d))
