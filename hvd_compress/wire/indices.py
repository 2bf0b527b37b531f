"""Ascending indices in few bits: Rice codes of the gaps between them.

Indices that are spread over n places at random cannot be written in less than log2(n/k) + 1.44 bits
each (k of them; the entropy of their choice).  Rice codes (Golomb, 1966; Rice and Plaunt, 1971)
come within 0.1 bit of that: a gap g is cut into g >> b, written in unary, and the b bits below.
At k = n / 1000 that is 11.5 bits, where Elias-Fano, the other code that can be decoded without a
loop, takes 12; so Rice it is.

The b is the best there is for the very gaps at hand, and never takes more than log2(n/k) + 2 bits.
Both halves of all gaps stand together, which lets NumPy (or a GPU) handle them as arrays::

    u8       b
    bits     k fields of b bits, the first bit the lowest; zeros up to a full byte
    bits     for each gap g >> b zeros and a one; zeros as needed

where gap i is the number of places between index i - 1 and index i, and "index -1" is -1.
"""

from __future__ import annotations

import math

import numpy as np

from hvd_compress.kernels import quotients, rice_pack, rice_unpack
from hvd_compress.kernels.bitpacking import full_bytes

#: what 64-bit integers allow with room to spare, and no gaps of real tensors need more
_MOST_BITS, _MOST_ELEMENTS = 48, 2**56


def gaps_of(indices: np.ndarray, dtype: str) -> np.ndarray:
    """Return the number of places between neighbours of the ascending ``indices``; ``dtype`` holds
    the largest index."""
    gaps = indices.astype(dtype)
    gaps[1:] -= indices[:-1].astype(dtype, copy=False) + 1
    return gaps


def best_parameter(gaps: np.ndarray, n: int) -> tuple[int, int] | None:
    """Return ``(b, bytes)`` of the shortest code of ``gaps`` in a tensor of ``n`` elements, or
    ``None`` if there is no code."""
    count = gaps.size
    if not count or n > _MOST_ELEMENTS:
        return None

    def bits(b: int) -> int:
        return count * (b + 1) + quotients(gaps, b)

    # Right for geometric gaps.  The number of bits is convex in b, so downhill leads to the least.
    mean = int(gaps.sum()) / count
    b = min(int(math.log2(max(1.0, mean * math.log(2)))), _MOST_BITS)
    best = bits(b)
    for step in (1, -1):
        while 0 <= b + step <= _MOST_BITS and (other := bits(b + step)) < best:
            b, best = b + step, other
    fields = count * b
    return b, 1 + full_bytes(fields) + full_bytes(best - fields)


def pack(gaps: np.ndarray, b: int, out: np.ndarray) -> None:
    """Write the code of ``gaps`` to the start of ``out`` (uint8, zeros)."""
    out[0] = b
    rice_pack(gaps, b, out[1:])


def unpack(code: np.ndarray, count: int, n: int) -> np.ndarray:
    """Return the ``count`` ascending indices (int64) within 0..n-1.

    Raises:
        ValueError: ``code`` is none of ``count`` such indices, with at most 7 bytes of padding.
    """
    if not count or not code.size or (b := int(code[0])) > _MOST_BITS:
        raise ValueError("packed indices without a valid parameter")
    return rice_unpack(code[1:], count, b, n)
