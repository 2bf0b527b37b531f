"""One bit an element, two means a column (1-bit SGD; Seide, Fu, Droppo, Li, Yu; Interspeech 2014).

The bit says whether an element is negative; all negative ones of a column become their mean, and
all others theirs.  For this partition the two means have the least squared error, and what is left
of a column adds up to zero.  Zeros count as non-negative; the mean of no elements is 0.

Columns are runs of ``length`` elements of a flat array, the last one as long as it gets.

Differs from CNTK's quantiser, which can also put the threshold at the mean of the column: here it
is always 0, as in the paper.
"""

from __future__ import annotations

import numpy as np

#: numbers that travel with each column
LEVELS = 2


def code_bytes(n: int) -> int:
    """Of the codes of ``n`` elements."""
    return -(-n // 8)


def encode(x: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """``(levels, codes)`` of the flat ``x`` (float32 or float64): the two means of each column,
    shape (columns, 2), in the dtype of ``x``; and the bits, packed, uint8.

    A column with NaN or Inf, or whose sums are out of range, has a level that is not finite.
    """
    bits, levels = np.empty(x.size, np.bool_), []
    with np.errstate(over="ignore"):
        start = 0
        for part in columns(x, length):
            mine = bits[start : start + part.size].reshape(part.shape)
            np.greater_equal(part, 0, out=mine)
            count = np.count_nonzero(mine, axis=1)
            low = np.minimum(part, 0).sum(axis=1) / np.maximum(part.shape[1] - count, 1)
            high = np.maximum(part, 0).sum(axis=1) / np.maximum(count, 1)
            levels.append(np.stack([low, high], axis=1).astype(x.dtype))
            start += part.size
    return np.concatenate(levels), np.packbits(bits)


def decode(levels: np.ndarray, codes: np.ndarray, n: int, length: int) -> np.ndarray:
    """The flat array of ``n`` elements that the codes stand for."""
    word = np.dtype(f"uint{8 * levels.dtype.itemsize}")
    low, high = np.ascontiguousarray(levels.T).view(word)
    bits = np.unpackbits(codes, count=n)
    values, column, start = np.empty(n, word), 0, 0
    for part in columns(bits, length):
        mine = slice(column, column + part.shape[0])
        chosen = values[start : start + part.size].reshape(part.shape)
        # Choosing by arithmetic on the bit patterns is exact, and six times as fast as np.where.
        np.multiply(part, (low ^ high)[mine, None], out=chosen)
        chosen ^= low[mine, None]
        column, start = mine.stop, start + part.size
    return values.view(levels.dtype)


def columns(x: np.ndarray, length: int) -> list[np.ndarray]:
    """Views of a flat array with a column in each row: those of full length, and the rest."""
    full = x.size // length * length
    parts = [x[:full].reshape(-1, length)]
    return parts if full == x.size else [*parts, x[full:].reshape(1, -1)]
