"""The Triton kernels of :mod:`hvd_compress.torch.triton.codecs`: numbers (float32) to codes,
and back.

They compute what kernels/codecs.h does in C++, with the same bits: each operation is rounded once,
and nothing is contracted.  A program takes a block of a task; see :mod:`.tasks`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import INFINITY, magnitudes
from .philox import FIRST, PLACE, drawn, philox
from .task_kernels import CODE, HEADS, LENGTH, SIZE, START, N, entry, in_range, short, taken

#: how numbers become digits, see :class:`hvd_compress.kernels.codecs.Digits`, or exponents
LINEAR, UNIFORM, EXPONENTIAL, TERNARY, FLOAT8, NATURAL = (tl.constexpr(i) for i in range(6))
#: what codes are: digits; bits for a level or its negative; bits for one of two levels of a run;
#: exponents, and then bits for signs
DIGITS, LEVELS, PAIRS, POWERS = (tl.constexpr(i) for i in range(4))
#: of which elements a bit is set
NEGATIVE, POSITIVE, NOT_NEGATIVE = (tl.constexpr(i) for i in range(3))
#: what is done with decoded values
WRITE, ADD, TAKE_OFF = (tl.constexpr(i) for i in range(3))
#: notes of a task: whether an element is not finite, and whether one of what is left is not
INFINITE, LEFT, NOTES = (tl.constexpr(i) for i in range(3))

#: of a tensor in a message: see :mod:`hvd_compress.fused.coded_plan`
FINE, NOT_FINITE, OVERFLOWS = (tl.constexpr(i) for i in range(3))

#: 1.5 * 2^23: in a sum with it the last bit is worth one
_ROUNDER = tl.constexpr(12582912.0)


# -- numbers to codes -----------------------------------------------------------------------------


@triton.jit
def _note(notes, task, x, what: tl.constexpr):
    """Say so where an element of a task is NaN or Inf."""
    if tl.max(magnitudes(x), 0) >= INFINITY:
        tl.store(notes + NOTES * task + what, 1)


@triton.jit
def look(x, notes, tasks, blocks, what: tl.constexpr, width: tl.constexpr):
    """Note what is not finite."""
    task, block = taken(blocks)
    at = block * width + tl.arange(0, width)
    inside = at < short(tasks, task, N)
    _note(notes, task, tl.load(x + entry(tasks, task, START) + at, mask=inside, other=0.0), what)


@triton.jit
def _between(x, most):
    """Clipped to -most .. most."""
    x = tl.where(x > -most, x, -most)
    return tl.where(x < most, x, most)


@triton.jit
def _float8(size, x, mantissa: tl.constexpr, bias: tl.constexpr):
    """The bits of a float with a number of them for the significand: to the nearest, ties to
    even."""
    cut: tl.constexpr = 23 - mantissa
    bits = size.to(tl.int32, bitcast=True)
    large = ((bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut) - (
        (127 - bias) << mantissa
    )
    small = (size * (2.0 ** (bias - 1 + mantissa)) + _ROUNDER).to(tl.int32, bitcast=True) & 127
    code = tl.where(size < 2.0 ** (1 - bias), small, large)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 128)


@triton.jit(do_not_specialize=["levels"])
def quantise(
    x, heads, limits, grid, draws, digits, notes, tasks, blocks, levels,
    kind: tl.constexpr, is_drawn: tl.constexpr, clipped: tl.constexpr, place: tl.constexpr,
    mantissa: tl.constexpr, bias: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write a digit (uint8) for each element, by the scale of its run, from ``place`` on.
    ``levels`` is the number of levels of each sign, or the largest number of a format.

    A ``NATURAL`` digit is the exponent of one of the two powers of two beside the element.  It is
    that of the nearer one, if there are no random numbers."""
    task, block = taken(blocks)
    at, inside, number = drawn(draws + PLACE * task, block, short(tasks, task, N), is_drawn, width)
    own = tl.load(x + entry(tasks, task, START) + at, mask=inside, other=0.0)
    _note(notes, task, own, INFINITE)
    most = tl.zeros((width,), tl.float32) + levels
    if kind != NATURAL:
        run = at // short(tasks, task, LENGTH)
        scale = tl.load(heads + entry(tasks, task, HEADS) + run, mask=inside, other=1.0)
    if kind == NATURAL:
        bits = magnitudes(own)
        part = (bits & 0x7FFFFF).to(tl.float32)
        limit = number if is_drawn else tl.full((width,), 0.5, tl.float32)
        digit = tl.minimum((bits >> 23) + (limit * 8388608.0 < part).to(tl.int32), 255)
    elif kind == TERNARY:
        size = tl.abs(own)
        if clipped:
            limit = tl.load(limits + task)
            size = tl.where(size < limit, size, limit)
        chosen = (number * scale < size).to(tl.int32)
        digit = 1 + tl.where(own < 0, -chosen, chosen)
    else:
        usable = scale > 0
        if (kind == UNIFORM) | (kind == EXPONENTIAL):
            usable = usable & (scale < float("inf"))
        steps = tl.div_rn(own, tl.where(usable, scale, 1.0))
        size = tl.abs(steps)
        if kind == LINEAR:
            near = (_between(steps, most) + _ROUNDER) - _ROUNDER
            digit = (near + most).to(tl.int32)
        elif kind == UNIFORM:
            steps = _between(steps * most, most + 1.0)
            # Triton's floor takes small numbers for zero.
            low = (steps + _ROUNDER) - _ROUNDER
            low -= (low > steps).to(tl.float32)
            low += (number < steps - low).to(tl.float32)
            digit = (_between(low, most) + most).to(tl.int32)
        elif kind == EXPONENTIAL:
            level = tl.zeros((width,), tl.int32)
            below = tl.zeros((width,), tl.float32)
            gap = below + tl.load(grid + 1)
            for i in range(1, levels):
                one = tl.load(grid + i)
                reached = size >= one
                level += reached.to(tl.int32)
                below = tl.where(reached, one, below)
                gap = tl.where(reached, tl.load(grid + i + 1) - one, gap)
            level += (number * gap < size - below).to(tl.int32)
            digit = levels + tl.where(own < 0, -level, level)
        else:
            digit = _float8(tl.where(size < most, size, most), own, mantissa, bias)
    tl.store(digits + entry(tasks, task, place) + at, digit.to(tl.uint8), mask=inside)


@triton.jit
def pack_fields(digits, out, tasks, blocks, bits: tl.constexpr, width: tl.constexpr):
    """Write the bytes of digits with ``bits`` bits each, the first bit the lowest."""
    task, block = taken(blocks)
    at = block * width + tl.arange(0, width)
    inside, n = at < short(tasks, task, SIZE), short(tasks, task, N)
    digits += entry(tasks, task, START)
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
    tl.store(out + entry(tasks, task, CODE) + at, (byte & 255).to(tl.uint8), mask=inside)


@triton.jit
def pack_words(
    digits, out, tasks, blocks, base: tl.constexpr, each: tl.constexpr, width: tl.constexpr
):
    """Write words of ``each`` digits, the first one the highest; the last word may have less."""
    task, block = taken(blocks)
    word, n = block * width + tl.arange(0, width), short(tasks, task, N)
    digits += entry(tasks, task, START)
    value = tl.zeros((width,), tl.uint64)
    for i in range(0, each):
        at = word * each + i
        inside = at < n
        own = tl.load(digits + at, mask=inside, other=0).to(tl.uint64)
        value = tl.where(inside, value * base + own, value)
    byte = tl.arange(0, 8)
    at = 8 * word[:, None] + byte[None, :]
    own = value[:, None] >> (8 * byte[None, :]).to(tl.uint64)
    out += entry(tasks, task, CODE)
    tl.store(out + at, (own & 255).to(tl.uint8), mask=at < short(tasks, task, SIZE))


@triton.jit
def _bytes_of(bits, width: tl.constexpr, big: tl.constexpr):
    """Eight bits (int32) to a byte, the first one the lowest, or the highest if ``big``."""
    place = tl.arange(0, 8)
    if big:
        place = 7 - place
    return tl.sum(tl.reshape(bits, (width // 8, 8)) << place[None, :], 1)


@triton.jit
def _byte(tasks, task, block, width: tl.constexpr):
    """The bytes of the bits of a block, and whether they exist."""
    byte = block * (width // 8) + tl.arange(0, width // 8)
    return byte, byte < (short(tasks, task, N) + 7) // 8


@triton.jit
def signs(
    x, out, notes, tasks, blocks,
    sign: tl.constexpr, big: tl.constexpr, last: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write a bit for each element, which are the ``last`` ones of the code, or all of it."""
    task, block = taken(blocks)
    at, n = block * width + tl.arange(0, width), short(tasks, task, N)
    own = tl.load(x + entry(tasks, task, START) + at, mask=at < n, other=0.0)
    _note(notes, task, own, INFINITE)
    if sign == NEGATIVE:
        bits = own < 0
    elif sign == POSITIVE:
        bits = own > 0
    else:
        bits = own >= 0
    byte, exists = _byte(tasks, task, block, width)
    packed = _bytes_of((bits & (at < n)).to(tl.int32), width, big)
    out += entry(tasks, task, CODE)
    if last:
        out += n
    tl.store(out + byte, packed.to(tl.uint8), mask=exists)


@triton.jit
def count_zeros(x, counts, tasks, blocks, width: tl.constexpr):
    """Count the zeros of each block."""
    task, block = taken(blocks)
    at = block * width + tl.arange(0, width)
    own = tl.load(x + entry(tasks, task, START) + at, mask=at < short(tasks, task, N), other=1.0)
    tl.store(counts + tl.program_id(0), tl.sum((own == 0).to(tl.int32), 0))


@triton.jit
def draw_zeros(x, ends, draws, out, tasks, blocks, width: tl.constexpr):
    """Set the bits of those zeros for which a number below 1/2 is drawn, one after the other.
    ``ends`` are the numbers of zeros up to and with each program."""
    program = tl.program_id(0)
    task, block = taken(blocks)
    at = block * width + tl.arange(0, width)
    x += entry(tasks, task, START)
    zero = tl.load(x + at, mask=at < short(tasks, task, N), other=1.0) == 0
    own = zero.to(tl.int32)
    here, end = tl.sum(own, 0), tl.load(ends + program).to(tl.int32)
    # Those of the tasks before.
    first = tl.load(ends + program - block - 1, mask=program > block, other=0).to(tl.int32)
    if here > 0:
        rank = end - first - here + tl.cumsum(own, 0) - own
        # A number takes a word, and is below 1/2 if its first bit is 0.
        draws += PLACE * task
        place = tl.load(draws + FIRST).to(tl.int32) // 2 + rank
        a, b, c, d = philox(draws, place // 4)
        is_even = place % 2 == 0
        word = tl.where(place % 4 < 2, tl.where(is_even, a, b), tl.where(is_even, c, d))
        byte, exists = _byte(tasks, task, block, width)
        packed = _bytes_of((zero & ((word >> 63) == 0)).to(tl.int32), width, False)
        out += entry(tasks, task, CODE)
        known = tl.load(out + byte, mask=exists, other=0).to(tl.int32)
        tl.store(out + byte, (known | packed).to(tl.uint8), mask=exists)


# -- codes to numbers -----------------------------------------------------------------------------


@triton.jit
def _field(code, at, inside, size, bits: tl.constexpr, base: tl.constexpr):
    """Digits in fields of ``bits``; those of ``base`` or more are damage."""
    start = (at % 8) * bits
    byte = (at // 8) * bits + start // 8
    low = tl.load(code + byte, mask=inside, other=0).to(tl.int32)
    high = tl.load(code + byte + 1, mask=inside & (byte + 1 < size), other=0).to(tl.int32)
    digit = ((low | (high << 8)) >> (start % 8)) & ((1 << bits) - 1)
    return tl.minimum(digit, base - 1)


@triton.jit
def _digit_of_word(
    code, at, inside, size, n, powers, each: tl.constexpr, base: tl.constexpr, width: tl.constexpr
):
    """Digits of which ``each`` are in a word, whose places are worth the ``powers``."""
    word = at // each
    held = tl.zeros((width,), tl.uint64)
    for i in tl.static_range(8):
        byte = 8 * word + i
        own = tl.load(code + byte, mask=inside & (byte < size), other=0)
        held |= own.to(tl.uint64) << (8 * i)
    place = tl.minimum(n - word * each, each) - 1 - at % each
    power = tl.load(powers + place, mask=inside, other=1).to(tl.uint64, bitcast=True)
    return ((held // power) % base).to(tl.int32)


@triton.jit
def _bit(code, at, inside, big: tl.constexpr):
    """Bits, of which the first of a byte is its lowest, or its highest if ``big``."""
    place = 7 - at % 8 if big else at % 8
    return (tl.load(code + at // 8, mask=inside, other=0).to(tl.int32) >> place) & 1


@triton.jit(do_not_specialize=["zero", "ranks", "row"])
def decode(
    code, heads, table, powers, out, tasks, blocks, ranks, row, zero, unit,
    kind: tl.constexpr, base: tl.constexpr, bits: tl.constexpr, each: tl.constexpr,
    listed: tl.constexpr, how: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write what the codes of a ``kind`` stand for, or add it, or take it off.

    Digits have ``bits`` bits, or are ``each`` in a word.  They stand for their difference from
    ``zero``, or for a number of the ``table`` if that is ``listed``.  Its unit is the scale of
    their run / ``unit``.  A level is the head of the task, or the only number of the table.

    Codes of so many ``ranks``, which are ``row`` bytes apart, are added one after the other."""
    task, block = taken(blocks)
    at, n = block * width + tl.arange(0, width), short(tasks, task, N)
    inside, size = at < n, short(tasks, task, SIZE)
    code += entry(tasks, task, CODE)
    heads += entry(tasks, task, HEADS)
    out += entry(tasks, task, START)
    run = at // short(tasks, task, LENGTH)
    total = tl.zeros((width,), tl.float32)
    if how != WRITE:
        total = tl.load(out + at, mask=inside, other=0.0)
    for _ in range(ranks):
        if kind == DIGITS:
            if each == 0:
                digit = _field(code, at, inside, size, bits, base)
            else:
                digit = _digit_of_word(code, at, inside, size, n, powers, each, base, width)
            scale = tl.load(heads + run, mask=inside, other=0.0)
            scale = tl.div_rn(scale, tl.full((width,), 1.0, tl.float32) * unit)
            if listed:
                value = tl.load(table + digit, mask=inside, other=0.0)
            else:
                value = (digit - zero).to(tl.float32)
            value = value * scale
        elif kind == LEVELS:
            level = tl.load(table if listed else heads)
            value = tl.where(_bit(code, at, inside, False) != 0, level, -level)
        elif kind == PAIRS:
            bit = _bit(code, at, inside, True)
            value = tl.load(heads + 2 * run + bit, mask=inside, other=0.0)
        else:
            exponent = tl.load(code + at, mask=inside, other=0).to(tl.int32)
            sign = _bit(code + n, at, inside, False)
            value = ((exponent << 23) | (sign << 31)).to(tl.float32, bitcast=True)
        if how == ADD:
            total += value
        elif how == TAKE_OFF:
            total -= value
        else:
            total = value
        code += row
        heads += row // 4
    tl.store(out + at, total, mask=inside)


# -- flags of messages ----------------------------------------------------------------------------


@triton.jit
def mark(notes, runs, frames, places, messages):
    """Write into all messages whether a tensor's values are finite.  ``runs`` are the first one of
    each tensor, and the one after its last; ``places`` are those of the messages' flags."""
    t = tl.program_id(0)
    infinite = 0
    for run in range(tl.load(runs + t), tl.load(runs + t + 1)):
        infinite |= tl.load(notes + NOTES * run + INFINITE)
    for message in range(messages):
        to = frames + tl.load(places + message) + t
        tl.store(to, tl.where(infinite != 0, NOT_FINITE, FINE).to(tl.uint8))


@triton.jit
def mark_sums(notes, owned, arrived, row, flags, ranks, reply):
    """Write into the message of the sums of a rank's own shards what its codes mean.  ``owned`` is
    the number of each tensor's shard, or -1; ``flags`` the place of these in all messages."""
    t = tl.program_id(0)
    run = tl.load(owned + t)
    if run >= 0:
        infinite = tl.load(notes + NOTES * run + INFINITE)
        theirs = arrived + flags + t
        for _ in range(ranks):
            infinite |= (tl.load(theirs) == NOT_FINITE).to(tl.int32)
            theirs += row
        left = tl.load(notes + NOTES * run + LEFT)
        flag = tl.where(infinite != 0, NOT_FINITE, tl.where(left != 0, OVERFLOWS, FINE))
        tl.store(reply + flags + t, flag.to(tl.uint8))


@triton.jit
def decide(arrived, places, messages, runs, message_of, known, fine, is_whole: tl.constexpr):
    """Note which runs' codes mean numbers, and of which tensors states become the new ones.
    ``arrived`` are messages with their flags at ``places``; ``message_of`` says in which one the
    code of a run is, or of whole tensors in all."""
    t = tl.program_id(0)
    infinite, others = 0, 0
    for message in range(messages):
        flag = tl.load(arrived + tl.load(places + message) + t)
        infinite |= (flag == NOT_FINITE).to(tl.int32)
        others |= (flag != FINE).to(tl.int32)
    for run in range(tl.load(runs + t), tl.load(runs + t + 1)):
        flag = NOT_FINITE * infinite
        if not is_whole:
            own = arrived + tl.load(places + tl.load(message_of + run)) + t
            flag = tl.load(own).to(tl.int32)
        tl.store(known + run, tl.where(flag != NOT_FINITE, 1, 0))
    if is_whole:
        others = infinite
    tl.store(fine + t, 1 - others)


@triton.jit
def _is(flags, number, notes, looks: tl.constexpr):
    """A flag, which with ``looks`` a note of what is not finite denies."""
    flag = tl.load(flags + number) != 0
    if looks:
        flag = flag & (tl.load(notes + NOTES * number + INFINITE) == 0)
    return flag


@triton.jit(do_not_specialize=["size"])
def divide(x, known, tasks, blocks, size, width: tl.constexpr):
    """Divide a block of a run by a number, in place; what is not ``known`` is NaN."""
    task, block = taken(blocks)
    at = block * width + tl.arange(0, width)
    inside = at < short(tasks, task, N)
    x += entry(tasks, task, START)
    mean = tl.div_rn(tl.load(x + at, mask=inside), tl.full((width,), size, tl.float32))
    tl.store(x + at, tl.where(tl.load(known + task) != 0, mean, float("nan")), mask=inside)


@triton.jit
def write(
    addresses, x, fine, tensors, notes, tasks, blocks,
    looks: tl.constexpr, is_state: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write a block of ``x`` where a run is, if its tensor is ``fine``; else a state stays what it
    was, within range."""
    task, block = taken(blocks)
    at = block * width + tl.arange(0, width)
    inside = at < short(tasks, task, N)
    new = tl.load(x + entry(tasks, task, START) + at, mask=inside, other=0.0)
    to = tl.load(addresses + task).to(tl.pointer_type(tl.float32)) + at
    old = tl.load(to, mask=inside, other=0.0)
    if is_state:
        old = in_range(old)
    tl.store(to, tl.where(_is(fine, tl.load(tensors + task), notes, looks), new, old), mask=inside)
