"""One bit per element and two means per column: 1-bit SGD (Seide, Fu, Droppo, Li, Yu; 2014)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress.codecs import runs
from hvd_compress.codecs.runs import ByColumn
from hvd_compress.codecs.selector import Classes
from hvd_compress.config import checked
from hvd_compress.kernels.bitpacking import full_bytes
from hvd_compress.kernels.codecs import Halves
from hvd_compress.kernels.reference import sums


@dataclasses.dataclass(frozen=True)
class column_means(ByColumn, name="column_means"):
    """The negative elements of a column become their mean, all others theirs.

    The two means have the least squared error for this division, and the errors of a column add up
    to zero.  Zeros count as non-negative; the mean of no elements is 0.

    Sent: two means per column and a bit per element.

    Options:
        column: number of elements in a column, a run of the flat tensor.  ``None`` takes one
            index of the first dimension, in PyTorch a row of a matrix or a filter.  Fewer than 64
            elements are joined, and more than 4096 divided.

    Reference: Seide et al., Interspeech 2014.

    >>> codec, x = column_means(column=4), np.array([3.0, 1.0, -2.0, -4.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 4, x.dtype)
    array([ 2.,  2., -3., -3.])
    """

    column: int | None = checked(runs.check_column, None)

    draws = False
    is_coarse = True

    @functools.cached_property
    def _loops(self) -> Halves:
        return Halves(self.column)

    def _bytes_of_means(self, n: int, dtype: np.dtype) -> int:
        return 2 * runs.count(n, self.column) * dtype.itemsize

    def size(self, n: int, dtype: np.dtype) -> int:
        return self._bytes_of_means(n, dtype) + full_bytes(n)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        bits, means = x >= 0, []
        columns = zip(runs.rows(x, self.column), runs.rows(bits, self.column), strict=True)
        with np.errstate(over="ignore", invalid="ignore"):
            for part, is_high in columns:
                count = np.count_nonzero(is_high, axis=1)
                low = sums(np.where(is_high, 0, part)) / np.maximum(part.shape[1] - count, 1)
                high = sums(np.where(is_high, part, 0)) / np.maximum(count, 1)
                means.append(np.stack([low, high], axis=1).astype(part.dtype))
        head = np.concatenate(means).astype(x.dtype.newbyteorder("<"))
        return np.concatenate([head.reshape(-1).view(np.uint8), np.packbits(bits)])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        split, word = self._bytes_of_means(n, dtype), np.dtype(f"uint{8 * dtype.itemsize}")
        means = code[:split].view(dtype.newbyteorder("<")).astype(dtype).reshape(-1, 2)
        low, high = np.ascontiguousarray(means.T).view(word)
        bits, values, first = np.unpackbits(code[split:], count=n), np.empty(n, word), 0
        columns = zip(runs.rows(bits, self.column), runs.rows(values, self.column), strict=True)
        for part, chosen in columns:
            mine = slice(first, first + part.shape[0])
            # Choosing by arithmetic on the bit patterns is exact, and faster than np.where.
            np.multiply(part, (low ^ high)[mine, None], out=chosen)
            chosen ^= low[mine, None]
            first = mine.stop
        return values.view(dtype)

    def classes(self, d: int) -> Classes:
        """Return those of a projection that is never worse than one mean of magnitudes."""
        d = min(d, self.column or d)
        return Classes(1 / d, 1.0, 1 / d, float(d))
