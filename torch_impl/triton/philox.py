"""Random numbers in Triton: those of NumPy's counter-based generator, from any place in its stream.

A place is an array of seven integers: the key (two), the counter (four), and the halves of words
that are drawn of the block.  See :func:`hvd_compress.kernels.codecs.place_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: of a place, and how many integers it has
_KEY, _COUNTER, FIRST, PLACE = (tl.constexpr(i) for i in (0, 2, 6, 7))
_EVEN, _ODD = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_NEXT, _OTHER = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def _word(stream, i):
    return tl.load(stream + i).to(tl.uint64, bitcast=True)


@triton.jit
def philox(stream, block):
    """The four words of each block of a stream: Philox 4x64 with ten rounds (Salmon, Moraes, Dror
    and Shaw, 2011)."""
    zero = tl.zeros(block.shape, tl.uint64)
    first, second = _word(stream, _KEY) + zero, _word(stream, _KEY + 1) + zero
    a = _word(stream, _COUNTER) + block.to(tl.uint64)
    b = _word(stream, _COUNTER + 1) + zero
    c = _word(stream, _COUNTER + 2) + zero
    d = _word(stream, _COUNTER + 3) + zero
    even, odd = tl.full(block.shape, _EVEN, tl.uint64), tl.full(block.shape, _ODD, tl.uint64)
    for _ in tl.static_range(10):
        above, below = tl.umulhi(c, odd), tl.umulhi(a, even)
        new_b, new_d = c * odd, a * even
        a = above ^ b ^ first
        c = below ^ d ^ second
        b = new_b
        d = new_d
        first += _NEXT
        second += _OTHER
    return a, b, c, d


@triton.jit
def drawn(stream, block, n, draws: tl.constexpr, width: tl.constexpr):
    """The elements of a block of a task, and whether they exist.  A random number from 0 to 1 (24
    bits) comes with each, if any are drawn."""
    at = block * width + tl.arange(0, width)
    number = tl.zeros((width,), tl.float32)
    if draws:
        start = tl.load(stream + FIRST).to(tl.int32)
        numbered = block * (width // 8) + tl.arange(0, width // 8) + start // 8
        a, b, c, d = philox(stream, numbered)
        words = tl.join(tl.join(a, c), tl.join(b, d))
        # The lower and the upper 32 bits, of which NumPy makes a number each.
        halves = tl.join(words.to(tl.uint32), (words >> 32).to(tl.uint32))
        bits = tl.reshape(halves, (width,))
        number = (bits >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
        at -= start % 8
    return at, (at >= 0) & (at < n), number
