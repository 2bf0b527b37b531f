"""Levels between the smallest and the largest magnitude, evenly spaced in their logarithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.config import choice
from hvd_compress.kernels.bitpacking import digits_size, pack_digits, unpack_digits


@dataclasses.dataclass(frozen=True)
class logarithmic(Codec, name="logarithmic"):
    """The nearest of ``-a_L .. -a_1, 0, a_1 .. a_L`` with ``a_j = a_1 r^(j - 1)``; halves go to the
    smaller magnitude.

    The levels belong to the array.  Its largest magnitude is a_L; a_1 is its smallest that is not
    zero, or a_L / 2^(L - 1) if that is larger.  Nothing is random.  An element between a_1 and a_L
    changes by at most (r - 1) / (r + 1) of itself, r being at most 2.

    Values that top-k has picked seldom differ by more than ten times, so that 4 bits are enough.
    After logarithmic quantisation (Miyashita, Lee and Murmann, 2016).

    Sent: a_1 and r, and ``bits`` bits per element.

    Options:
        bits: 3 to 8; L = 2^(bits - 1) - 1.

    >>> codec, x = logarithmic(bits=3), np.array([8.0, -5.0, 2.0, 0.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 4, x.dtype)
    array([ 8., -4.,  2.,  0.])
    """

    bits: int = choice(*range(3, 9), default=4)

    @property
    def levels(self) -> int:
        """L, of the class's docstring."""
        return 2 ** (self.bits - 1) - 1

    def of_parts(self, counts: Sequence[int]) -> Codec:
        """Return the codec for arrays that lie end to end, with ``counts`` elements each, at least
        one.  It gives each the values that this codec would give it alone."""
        return _Segmented(self, counts)

    def size(self, n: int, dtype: np.dtype) -> int:
        return _size(n, int(n > 0), dtype, self.levels)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return self.of_parts([x.size] if x.size else []).encode(x, random)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        return self.of_parts([n] if n else []).decode(code, n, dtype)


class _Segmented(Codec):
    """On the wire the pairs a_1, r of all arrays come first, then the numbers of all levels.  An
    array that is not finite has a pair of NaN, which makes all its values NaN."""

    takes_non_finite = True

    def __init__(self, codec: logarithmic, counts: Sequence[int]) -> None:
        self._levels, self._counts = codec.levels, np.asarray(counts, np.int64)
        self._starts = np.cumsum(self._counts) - self._counts
        self._part = np.repeat(np.arange(self._counts.size), self._counts)
        self._repr = f"{codec!r} of {list(counts)}"

    def __repr__(self) -> str:
        return self._repr

    def size(self, n: int, dtype: np.dtype) -> int:
        return _size(n, self._counts.size, dtype, self._levels)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if not x.size:
            return np.empty(0, np.uint8)
        pairs = self._pairs(x)
        ladders = self._ladders(pairs)  # of each part, 0, a_1 ... a_L
        limits = (ladders[:, 1:] + ladders[:, :-1]) / 2
        magnitude = np.abs(x)
        level = np.zeros(x.size, np.uint8)
        with np.errstate(invalid="ignore"):
            for limit in limits.T:
                level += magnitude > limit[self._part]
        digits = np.where(x < 0, self._levels - level, self._levels + level).astype(np.uint8)
        head = pairs.astype(x.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
        return np.concatenate([head, pack_digits(digits, _base(self._levels))])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        split = 2 * self._counts.size * dtype.itemsize
        pairs = code[:split].view(dtype.newbyteorder("<")).astype(dtype).reshape(-1, 2)
        digits = unpack_digits(code[split:], n, _base(self._levels))
        ladders = self._ladders(pairs)
        table = np.concatenate([-ladders[:, :0:-1], ladders], axis=1)
        with np.errstate(over="ignore"):  # of a damaged code
            return table[self._part, digits].astype(dtype)

    def _pairs(self, x: np.ndarray) -> np.ndarray:
        """a_1 and r of each part, in the dtype of ``x``."""
        magnitude = np.abs(x)
        largest = np.maximum.reduceat(magnitude, self._starts).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            some = np.where(magnitude > 0, magnitude, np.inf)
            smallest = np.minimum.reduceat(some, self._starts).astype(np.float64)
            smallest = np.maximum(smallest, largest * 2.0 ** (1 - self._levels))
            smallest = np.where(largest > 0, smallest, 0).astype(x.dtype)
            quotient = np.where(smallest > 0, largest / smallest, 1)
            ratio = (quotient ** (1 / (self._levels - 1))).astype(x.dtype)
        pairs = np.stack([smallest, ratio], axis=1)
        pairs[~np.isfinite(largest)] = np.nan
        return pairs

    def _ladders(self, pairs: np.ndarray) -> np.ndarray:
        """Zero and the levels of each part (float64, within the range of the dtype of ``pairs``).
        Products alone, so that every machine has the same bits."""
        first, ratio = pairs.astype(np.float64).T
        ladders = np.empty((pairs.shape[0], self._levels + 1))
        with np.errstate(invalid="ignore", over="ignore"):
            ladders[:, 0], ladders[:, 1] = 0 * first, first
            for j in range(2, self._levels + 1):
                ladders[:, j] = ladders[:, j - 1] * ratio
        return np.minimum(ladders, np.finfo(pairs.dtype).max)


def _base(levels: int) -> int:
    return 2 * levels + 1


def _size(n: int, parts: int, dtype: np.dtype, levels: int) -> int:
    return 2 * parts * dtype.itemsize + digits_size(n, _base(levels))
