"""The Triton kernels of :mod:`hvd_compress.torch.triton_codecs`: numbers (float32) to codes and back.

They compute what kernels/codecs.h does in C++, with the same bits: an operation of float32 or
float64 is rounded once, nothing is contracted, and sums have the order of
:func:`hvd_compress.kernels.reference.sums`.  Elements are counted by 32-bit integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_kernels import INFINITY, magnitudes

#: elements that are added up in one go, which defines the sum
SUMMED = tl.constexpr(4096)
#: what sums are of; "low" are the negative elements, "high" all others, which "many" counts
PLAIN, MAGNITUDE, SQUARE, DEVIATION, LOW, HIGH, MANY = (tl.constexpr(i) for i in range(7))
#: how numbers become digits; see :class:`hvd_compress.kernels.codecs.Digits`
LINEAR, UNIFORM, EXPONENTIAL, TERNARY, FLOAT8, NATURAL = (tl.constexpr(i) for i in range(6))
#: where random numbers come from
NOWHERE, ARRAY, STREAM = (tl.constexpr(i) for i in range(3))
#: of which elements a bit is set
NEGATIVE, POSITIVE, NOT_NEGATIVE = (tl.constexpr(i) for i in range(3))
#: what is made of sums
MEAN, ROOT, MEAN_ROOT, LIMIT = (tl.constexpr(i) for i in range(4))

# The numbers of a place in a random stream: key, counter, and what has been drawn.
_KEY, _COUNTER, _FIRST = (tl.constexpr(i) for i in (0, 2, 6))
_EVEN, _ODD = tl.constexpr(0xD2E7470EE14C6C93), tl.constexpr(0xCA5A826395121157)
_NEXT, _OTHER = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xBB67AE8584CAA73B)
#: 1.5 * 2^23: in a sum with it the last bit is worth one
_ROUNDER = tl.constexpr(12582912.0)


# -- random numbers -------------------------------------------------------------------------------


@triton.jit
def _word(stream, i):
    return tl.load(stream + i).to(tl.uint64, bitcast=True)


@triton.jit
def _philox(stream, block):
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
def _halves(word):
    """The lower and the upper 32 bits, of which NumPy makes a number each."""
    return tl.join(word.to(tl.uint32), (word >> 32).to(tl.uint32))


@triton.jit
def _drawn(draws, n, source: tl.constexpr, width: tl.constexpr):
    """The elements that a program takes, whether they exist, and a random number from 0 to 1 (24
    bits) for each."""
    first = tl.program_id(0) * width
    if source == STREAM:
        start = tl.load(draws + _FIRST).to(tl.int32)
        block = tl.program_id(0) * (width // 8) + tl.arange(0, width // 8) + start // 8
        a, b, c, d = _philox(draws, block)
        words = tl.join(tl.join(a, c), tl.join(b, d))
        bits = tl.reshape(_halves(words), (width,))
        number = (bits >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
        at = first + tl.arange(0, width) - start % 8
        inside = (at >= 0) & (at < n)
    else:
        at = first + tl.arange(0, width)
        inside = at < n
        number = tl.zeros((width,), tl.float32)
        if source == ARRAY:
            number = tl.load(draws + at, mask=inside, other=0.0)
    return at, inside, number


# -- sums and largest magnitudes ------------------------------------------------------------------


@triton.jit
def _spans(n, length, blocks, count, rows: tl.constexpr):
    """The blocks that a program takes, and the elements from which and up to which they go; a run of
    ``length`` has so many ``blocks``, of which the last ones may be short or empty."""
    block = tl.program_id(0) * rows + tl.arange(0, rows)
    known = block < count
    block = tl.where(known, block, 0)
    run = block // blocks
    start = run * length + (block % blocks) * SUMMED
    end = tl.minimum(tl.minimum(start + SUMMED, (run + 1) * length), n)
    return block, known, run, start, tl.where(known, end, 0)


@triton.jit
def _term(x, shift, term: tl.constexpr):
    if term == MAGNITUDE:
        return tl.abs(x)
    elif term == SQUARE:
        return x * x
    elif term == DEVIATION:
        own = x - tl.load(shift)
        return own * own
    elif term == LOW:
        return tl.where(x >= 0, 0.0, x)
    elif term == HIGH:
        return tl.where(x >= 0, x, 0.0)
    elif term == MANY:
        return (x >= 0).to(tl.float64)
    else:
        return x


@triton.jit(do_not_specialize=["n", "length", "blocks", "count"])
def sums(x, shift, out, n, length, blocks, count, term: tl.constexpr, rows: tl.constexpr):
    """Write the sum of each block: sixteen sums of every sixteenth element each, added in halves."""
    block, known, run, start, end = _spans(n, length, blocks, count, rows)
    lane = tl.arange(0, 16)
    total = tl.zeros((rows, 16), tl.float64)
    for i in range(0, tl.minimum(length, SUMMED), 16):
        at = start[:, None] + (i + lane)[None, :]
        inside = at < end[:, None]
        own = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
        total += tl.where(inside, _term(own, shift, term), 0.0)
    # Of two terms the order does not matter.
    total = tl.sum(tl.reshape(total, (rows, 2, 8)), 1)
    total = tl.sum(tl.reshape(total, (rows, 2, 4)), 1)
    total = tl.sum(tl.reshape(total, (rows, 2, 2)), 1)
    tl.store(out + block, tl.sum(total, 1) + 0.0, mask=known)


@triton.jit(do_not_specialize=["n", "length", "blocks", "count"])
def largest(x, out, n, length, blocks, count, rows: tl.constexpr):
    """Put the largest magnitude of each run, as an integer, into ``out``, which is zero before."""
    block, known, run, start, end = _spans(n, length, blocks, count, rows)
    lane = tl.arange(0, 16)
    most = tl.zeros((rows, 16), tl.int32)
    for i in range(0, tl.minimum(length, SUMMED), 16):
        at = start[:, None] + (i + lane)[None, :]
        own = tl.load(x + at, mask=at < end[:, None], other=0.0)
        most = tl.maximum(most, magnitudes(own))
    tl.atomic_max(out + run, tl.max(most, 1), mask=known, sem="relaxed")


@triton.jit(do_not_specialize=["count", "n", "clip"])
def of_sums(found, out, count, n, clip, kind: tl.constexpr, width: tl.constexpr):
    """Write what is made of each sum over ``n`` elements, in the type of ``out``.  ``clip``: the bits
    of a float64."""
    i = tl.program_id(0) * width + tl.arange(0, width)
    inside = i < count
    total = tl.load(found + i, mask=inside, other=0.0)
    if kind != ROOT:
        total = total / (tl.zeros((width,), tl.float64) + n)
    if kind != MEAN:
        total = tl.sqrt(total)
    if kind == LIMIT:
        total = total * clip.to(tl.int64).to(tl.float64, bitcast=True)
        total = tl.where(total > 0, total, float("inf"))
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def of_largest(
    found, limits, out, count, most, kind: tl.constexpr, clipped: tl.constexpr, width: tl.constexpr
):
    """Write the scale of each run.  ``most`` is the number of levels, or the largest number of a
    format; ``limits`` points to that of magnitudes."""
    i = tl.program_id(0) * width + tl.arange(0, width)
    inside = i < count
    own = tl.load(found + i, mask=inside, other=0).to(tl.float32, bitcast=True)
    highest = tl.full((width,), 1.0, tl.float32) * most
    scale = own
    if kind == LINEAR:
        # What would overflow when decoded has to arrive as something that is not finite.
        scale = tl.div_rn(own, highest)
        scale = tl.where(scale * highest < float("inf"), scale, float("inf"))
    elif kind == FLOAT8:
        # Of subnormal numbers the quotient may be 0.
        scale = tl.div_rn(own, highest)
        scale = tl.where(scale > 0, scale, own)
    elif clipped:
        limit = tl.load(limits)
        scale = tl.where(own < limit, own, limit)
    tl.store(out + i, scale, mask=inside)


@triton.jit(do_not_specialize=["count", "length", "n"])
def two_means(low, high, many, out, count, length, n, width: tl.constexpr):
    """Write the means of those elements of each run that are negative, and of those that are not."""
    i = tl.program_id(0) * width + tl.arange(0, width)
    inside = i < count
    others = tl.load(many + i, mask=inside, other=0.0)
    few = (tl.minimum(length, n - i * length)).to(tl.float64) - others
    one = tl.full((width,), 1.0, tl.float64)
    low = tl.load(low + i, mask=inside, other=0.0) / tl.where(few > 1, few, one)
    high = tl.load(high + i, mask=inside, other=0.0) / tl.where(others > 1, others, one)
    tl.store(out + 2 * i, low.to(tl.float32), mask=inside)
    tl.store(out + 2 * i + 1, high.to(tl.float32), mask=inside)


# -- numbers to codes -----------------------------------------------------------------------------


@triton.jit
def _note(infinite, x):
    """Say so where an element is NaN or Inf."""
    if tl.max(magnitudes(x), 0) >= INFINITY:
        tl.store(infinite, 1)


@triton.jit
def _between(x, most):
    """Clipped to -most .. most."""
    x = tl.where(x > -most, x, -most)
    return tl.where(x < most, x, most)


@triton.jit
def _float8(size, x, mantissa: tl.constexpr, bias: tl.constexpr):
    """The bits of a float with so many of them for the significand, to the nearest, ties to even."""
    cut: tl.constexpr = 23 - mantissa
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut) - (
        (127 - bias) << mantissa
    )
    small = (size * (2.0 ** (bias - 1 + mantissa)) + _ROUNDER).to(tl.int32, bitcast=True) & 127
    code = tl.where(size < 2.0 ** (1 - bias), small, large)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit
def _natural(x, limit):
    """The exponent of one of the two powers of two beside each element."""
    bits = magnitudes(x)
    part = (bits & 0x7FFFFF).to(tl.float32)
    return tl.minimum((bits >> 23) + (limit * 8388608.0 < part).to(tl.int32), 255)


@triton.jit(do_not_specialize=["n", "length", "levels"])
def quantise(
    x, heads, limits, grid, draws, digits, infinite, n, length, levels,
    kind: tl.constexpr, source: tl.constexpr, clipped: tl.constexpr,
    mantissa: tl.constexpr, bias: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write a digit (uint8) for each element, by the scale of its run.  ``levels`` is the number of
    levels of each sign, or the largest number of a format."""
    at, inside, drawn = _drawn(draws, n, source, width)
    own = tl.load(x + at, mask=inside, other=0.0)
    _note(infinite, own)
    if kind == NATURAL:
        if source == NOWHERE:
            drawn = tl.full((width,), 0.5, tl.float32)
        tl.store(digits + at, _natural(own, drawn).to(tl.uint8), mask=inside)
    else:
        scale = tl.load(heads + at // length, mask=inside, other=1.0)
        most = tl.zeros((width,), tl.float32) + levels
        if kind == TERNARY:
            size = tl.abs(own)
            if clipped:
                limit = tl.load(limits)
                size = tl.where(size < limit, size, limit)
            chosen = (drawn * scale < size).to(tl.int32)
            digit = 1 + tl.where(own < 0, -chosen, chosen)
        else:
            usable = scale > 0
            if (kind == UNIFORM) | (kind == EXPONENTIAL):
                usable = usable & (scale < float("inf"))
            steps = tl.div_rn(own, tl.where(usable, scale, 1.0))
            if kind == LINEAR:
                near = (_between(steps, most) + _ROUNDER) - _ROUNDER
                digit = (near + most).to(tl.int32)
            elif kind == UNIFORM:
                steps = _between(steps * most, most + 1.0)
                # Triton's floor takes small numbers for zero.
                low = (steps + _ROUNDER) - _ROUNDER
                low -= (low > steps).to(tl.float32)
                low += (drawn < steps - low).to(tl.float32)
                digit = (_between(low, most) + most).to(tl.int32)
            elif kind == EXPONENTIAL:
                size = tl.abs(steps)
                level = tl.zeros((width,), tl.int32)
                below = tl.zeros((width,), tl.float32)
                gap = below + tl.load(grid + 1)
                for i in range(1, levels):
                    one = tl.load(grid + i)
                    reached = size >= one
                    level += reached.to(tl.int32)
                    below = tl.where(reached, one, below)
                    gap = tl.where(reached, tl.load(grid + i + 1) - one, gap)
                level += (drawn * gap < size - below).to(tl.int32)
                digit = levels + tl.where(own < 0, -level, level)
            else:
                size = tl.abs(steps)
                digit = _float8(tl.where(size < most, size, most), own, mantissa, bias)
        tl.store(digits + at, digit.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["n", "size"])
def pack_fields(digits, out, n, size, bits: tl.constexpr, width: tl.constexpr):
    """Write the bytes of digits with ``bits`` bits each, the first bit the lowest."""
    at = tl.program_id(0) * width + tl.arange(0, width)
    inside = at < size
    # Eight fields are `bits` bytes.
    start = 8 * (at % bits)
    byte = tl.zeros((width,), tl.int32)
    for i in tl.static_range(8 // bits + 2):
        field = start // bits + i
        place = field * bits - start
        digit = 8 * (at // bits) + field
        own = tl.load(digits + digit, mask=inside & (digit < n), other=0).to(tl.int32)
        # A field begins less than eight bits in front of the byte, or in it, or behind it.
        byte |= tl.where(place < 8, (own << tl.minimum(place + 8, 15)) >> 8, 0)
    tl.store(out + at, (byte & 255).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["n", "size"])
def pack_words(digits, out, n, size, base: tl.constexpr, each: tl.constexpr, width: tl.constexpr):
    """Write words of ``each`` digits, the first one the highest; the last word may have less."""
    word = tl.program_id(0) * width + tl.arange(0, width)
    value = tl.zeros((width,), tl.uint64)
    for i in range(0, each):
        at = word * each + i
        inside = at < n
        own = tl.load(digits + at, mask=inside, other=0).to(tl.uint64)
        value = tl.where(inside, value * base + own, value)
    byte = tl.arange(0, 8)
    at = 8 * word[:, None] + byte[None, :]
    own = value[:, None] >> (8 * byte[None, :]).to(tl.uint64)
    tl.store(out + at, (own & 255).to(tl.uint8), mask=at < size)


@triton.jit
def _bytes_of(bits, width: tl.constexpr, big: tl.constexpr):
    """Eight bits (int32) to a byte, the first one the lowest, or the highest if ``big``."""
    place = tl.arange(0, 8)
    if big:
        place = 7 - place
    return tl.sum(tl.reshape(bits, (width // 8, 8)) << place[None, :], 1)


@triton.jit(do_not_specialize=["n"])
def signs(x, out, infinite, n, sign: tl.constexpr, big: tl.constexpr, width: tl.constexpr):
    """Write a bit for each element."""
    at = tl.program_id(0) * width + tl.arange(0, width)
    inside = at < n
    own = tl.load(x + at, mask=inside, other=0.0)
    _note(infinite, own)
    if sign == NEGATIVE:
        bits = own < 0
    elif sign == POSITIVE:
        bits = own > 0
    else:
        bits = own >= 0
    byte = tl.program_id(0) * (width // 8) + tl.arange(0, width // 8)
    packed = _bytes_of((bits & inside).to(tl.int32), width, big)
    tl.store(out + byte, packed.to(tl.uint8), mask=byte < (n + 7) // 8)


@triton.jit(do_not_specialize=["n"])
def count_zeros(x, counts, n, width: tl.constexpr):
    """Count the zeros of each block."""
    at = tl.program_id(0) * width + tl.arange(0, width)
    own = tl.load(x + at, mask=at < n, other=1.0)
    tl.store(counts + tl.program_id(0), tl.sum((own == 0).to(tl.int32), 0))


@triton.jit(do_not_specialize=["n"])
def draw_zeros(x, ends, draws, out, zeros, n, width: tl.constexpr):
    """Set the bits of those zeros for which a number below 1/2 is drawn, one after the other, and
    write how many there are.  ``ends`` are the numbers of zeros up to and with each block."""
    tl.store(zeros, tl.load(ends + tl.num_programs(0) - 1).to(tl.int32))
    at = tl.program_id(0) * width + tl.arange(0, width)
    zero = tl.load(x + at, mask=at < n, other=1.0) == 0
    own = zero.to(tl.int32)
    here = tl.sum(own, 0)
    if here > 0:
        rank = tl.load(ends + tl.program_id(0)).to(tl.int32) - here + tl.cumsum(own, 0) - own
        # A number takes a word, and is below 1/2 if its first bit is 0.
        place = tl.load(draws + _FIRST).to(tl.int32) // 2 + rank
        a, b, c, d = _philox(draws, place // 4)
        word = tl.where(place % 4 < 2, tl.where(place % 4 == 0, a, b), tl.where(place % 4 == 2, c, d))
        byte = tl.program_id(0) * (width // 8) + tl.arange(0, width // 8)
        exists = byte < (n + 7) // 8
        packed = _bytes_of((zero & ((word >> 63) == 0)).to(tl.int32), width, False)
        known = tl.load(out + byte, mask=exists, other=0).to(tl.int32)
        tl.store(out + byte, (known | packed).to(tl.uint8), mask=exists)


# -- codes to numbers -----------------------------------------------------------------------------


@triton.jit
def _give(out, at, inside, value, add: tl.constexpr):
    if add:
        value = tl.load(out + at, mask=inside, other=0.0) + value
    tl.store(out + at, value, mask=inside)


@triton.jit(do_not_specialize=["n", "size", "length", "zero"])
def from_digits(
    code, heads, table, powers, out, n, size, length, zero, unit,
    base: tl.constexpr, bits: tl.constexpr, each: tl.constexpr, listed: tl.constexpr,
    add: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write what digits stand for, times the scale of their run, or add it.  Digits have ``bits``
    bits each, or are ``each`` in a word, whose places are worth the ``powers``."""
    at = tl.program_id(0) * width + tl.arange(0, width)
    inside = at < n
    if each == 0:
        start = (at % 8) * bits
        byte = (at // 8) * bits + start // 8
        low = tl.load(code + byte, mask=inside, other=0).to(tl.int32)
        high = tl.load(code + byte + 1, mask=inside & (byte + 1 < size), other=0).to(tl.int32)
        digit = ((low | (high << 8)) >> (start % 8)) & ((1 << bits) - 1)
        digit = tl.minimum(digit, base - 1)  # others are damage
    else:
        word = at // each
        held = tl.minimum(n - word * each, each)
        value = tl.zeros((width,), tl.uint64)
        for i in tl.static_range(8):
            byte = 8 * word + i
            own = tl.load(code + byte, mask=inside & (byte < size), other=0)
            value |= own.to(tl.uint64) << (8 * i)
        place = held - 1 - at % each
        power = tl.load(powers + place, mask=inside, other=1).to(tl.uint64, bitcast=True)
        digit = ((value // power) % base).to(tl.int32)
    scale = tl.load(heads + at // length, mask=inside, other=0.0)
    scale = tl.div_rn(scale, tl.full((width,), 1.0, tl.float32) * unit)
    if listed:
        value = tl.load(table + digit, mask=inside, other=0.0)
    else:
        value = (digit - zero).to(tl.float32)
    _give(out, at, inside, value * scale, add)


@triton.jit(do_not_specialize=["n", "length"])
def from_bits(
    code, levels, out, n, length, paired: tl.constexpr, big: tl.constexpr,
    add: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write one of the two levels of its run for each bit, or add it; if they are not ``paired``, the
    first one is the negative of the second, which is all there is."""
    at = tl.program_id(0) * width + tl.arange(0, width)
    inside = at < n
    place = at % 8
    if big:
        place = 7 - place
    bit = (tl.load(code + at // 8, mask=inside, other=0).to(tl.int32) >> place) & 1
    if paired:
        value = tl.load(levels + 2 * (at // length) + bit, mask=inside, other=0.0)
    else:
        level = tl.load(levels)
        value = tl.where(bit != 0, level, -level)
    _give(out, at, inside, value, add)


@triton.jit(do_not_specialize=["n"])
def from_natural(code, negative, out, n, add: tl.constexpr, width: tl.constexpr):
    """Write powers of two, or add them."""
    at = tl.program_id(0) * width + tl.arange(0, width)
    inside = at < n
    exponent = tl.load(code + at, mask=inside, other=0).to(tl.int32)
    sign = (tl.load(negative + at // 8, mask=inside, other=0).to(tl.int32) >> (at % 8)) & 1
    value = ((exponent << 23) | (sign << 31)).to(tl.float32, bitcast=True)
    _give(out, at, inside, value, add)
