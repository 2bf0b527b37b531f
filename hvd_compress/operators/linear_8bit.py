"""Eight bits an element, one scale a column: symmetric, linear, to the nearest of 255 values.

``scale = max |x| / 127`` and ``code = round(x / scale)``, halves to even.  Nothing is random: the
error of an element is at most half of its column's scale, and error feedback carries it over.
Columns are runs of ``length`` elements of a flat array, the last one as long as it gets.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.operators.one_bit import columns

#: numbers that travel with each column
LEVELS = 1
_LARGEST = 127


def code_bytes(n: int) -> int:
    """Of the codes of ``n`` elements."""
    return n


def encode(x: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """``(levels, codes)`` of the flat ``x`` (float32 or float64): the scales, shape (columns, 1),
    in the dtype of ``x``; and the codes, int8 seen as uint8.

    A column with NaN or Inf, or whose largest value would be out of range once decoded, has a
    scale that is not finite.
    """
    codes, levels = np.empty(x.size, np.int8), []
    start = 0
    for part in columns(x, length):
        mine = codes[start : start + part.size].reshape(part.shape)
        scale = np.abs(part).max(axis=1, keepdims=True) / x.dtype.type(_LARGEST)
        with np.errstate(over="ignore", invalid="ignore"):
            scale[~np.isfinite(scale * _LARGEST)] = np.inf
            steps = np.rint(part / np.where(scale > 0, scale, 1))
            # Scales below the normal numbers are coarse: x / scale may be more than 127.
            mine[:] = np.clip(steps, -_LARGEST, _LARGEST, out=steps)
        levels.append(scale)
        start += part.size
    return np.concatenate(levels), codes.view(np.uint8)


def decode(levels: np.ndarray, codes: np.ndarray, n: int, length: int) -> np.ndarray:
    """The flat array of ``n`` elements that the codes stand for."""
    values, column, start = np.empty(n, levels.dtype), 0, 0
    for part in columns(codes.view(np.int8), length):
        mine = slice(column, column + part.shape[0])
        chosen = values[start : start + part.size].reshape(part.shape)
        np.multiply(part, levels[mine], out=chosen, casting="unsafe")
        column, start = mine.stop, start + part.size
    return values
