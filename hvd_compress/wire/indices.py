"""Ascending indices in few bits: codes of the gaps between them, by Rice or by Elias.

Rice codes (Golomb, 1966; Rice and Plaunt, 1971) come within 0.1 bit of the entropy of indices that
are spread at random.  Elias codes (1975) take a single bit for a gap of zero, and are shorter where
indices stand together.  The shortest is taken.  The layouts of all three, and what was measured,
stand in docs/wire-format.md#packed-indices.

Gap i is the number of places between index i - 1 and index i, and "index -1" is -1.
"""

from __future__ import annotations

import math

import numpy as np

from hvd_compress.kernels import (
    elias_pack,
    elias_unpack,
    index_bits,
    quotients,
    rice_pack,
    rice_unpack,
)

#: what 64-bit integers allow with room to spare, and no gaps of real tensors need more
_MOST_BITS, _MOST_ELEMENTS = 48, 2**56
#: in the place of b; Elias codes have no parameter
_GAMMA, _DELTA = 64, 65


def gaps_of(indices: np.ndarray, dtype: str) -> np.ndarray:
    """Return the number of places between neighbours of the ascending ``indices``; ``dtype`` holds
    the largest index."""
    gaps = indices.astype(dtype)
    gaps[1:] -= indices[:-1].astype(dtype, copy=False) + 1
    return gaps


def best_parameter(gaps: np.ndarray, n: int) -> tuple[int, int] | None:
    """Return ``(b, bytes)`` of the shortest code of ``gaps`` in a tensor of ``n`` elements, or
    ``None`` if there is no code.  ``b`` is the parameter of a Rice code, or stands for one of
    Elias."""
    count = gaps.size
    if not count or n > _MOST_ELEMENTS:
        return None

    # Right for geometric gaps.  The number of bits is convex in b, so downhill leads to the least.
    mean = int(gaps.sum()) / count
    b = min(int(math.log2(max(1.0, mean * math.log(2)))), _MOST_BITS)
    middle = min(max(b, 1), _MOST_BITS - 1)
    *known, gamma, delta = index_bits(gaps, middle)

    sums = {middle - 1 + i: known[i] for i in range(len(known))}  # of quotients
    best = count * (b + 1) + sums[b]
    for step in (1, -1):
        while 0 <= b + step <= _MOST_BITS:
            if b + step not in sums:
                sums[b + step] = quotients(gaps, b + step)
            if (other := count * (b + step + 1) + sums[b + step]) >= best:
                break
            b, best = b + step, other
    lengths = (gamma - count) // 2  # the sum of L, and of M
    widths = (delta - count - lengths) // 2
    # Each part of a code has bytes of its own, and in front is the parameter.
    size = 1 + (count * b + 7) // 8 + (best - count * b + 7) // 8
    if n <= 2**_MOST_BITS:
        of_gamma = 1 + (count + lengths + 7) // 8 + (lengths + 7) // 8
        of_delta = 1 + (count + widths + 7) // 8 + (widths + 7) // 8 + (lengths + 7) // 8
        size, b = min((size, b), (of_gamma, _GAMMA), (of_delta, _DELTA))
    return b, size


def pack(gaps: np.ndarray, b: int, out: np.ndarray) -> None:
    """Write the code of ``gaps`` to the start of ``out`` (uint8, zeros)."""
    out[0] = b
    if b <= _MOST_BITS:
        rice_pack(gaps, b, out[1:])
    else:
        elias_pack(gaps, b == _DELTA, out[1:])


def unpack(code: np.ndarray, count: int, n: int) -> np.ndarray:
    """Return the ``count`` ascending indices (int64) within 0..n-1.

    Raises:
        ValueError: ``code`` is none of ``count`` such indices, with at most 7 bytes of padding.
    """
    if count and code.size:
        if (b := int(code[0])) <= _MOST_BITS:
            return rice_unpack(code[1:], count, b, n)
        if b in (_GAMMA, _DELTA):
            return elias_unpack(code[1:], count, b == _DELTA, n)
    raise ValueError("packed indices without a valid parameter")
