"""The Triton kernels of :mod:`hvd_compress.torch.triton.sums`.

A program takes some blocks of runs of elements.  Sums have the order of
:func:`hvd_compress.kernels.reference.sums`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codec_kernels import FLOAT8, LINEAR
from .kernels import magnitudes

#: what sums are of; "low" are the negative elements, "high" all others, which "many" counts
PLAIN, MAGNITUDE, SQUARE, DEVIATION, LOW, HIGH, MANY = (tl.constexpr(i) for i in range(7))
#: what is made of sums
MEAN, ROOT, MEAN_ROOT, LIMIT = (tl.constexpr(i) for i in range(4))
#: of a run: the place of its head, and how many elements its task has, and it itself
_PLACE, _N, _OWN = (tl.constexpr(i) for i in range(3))


@triton.jit
def _spans(level, count, rows: tl.constexpr):
    """The blocks that a program takes, whether they exist, and their rows of a level's table."""
    block = tl.program_id(0) * rows + tl.arange(0, rows)
    known = block < count
    return block, known, level + 4 * tl.where(known, block, 0).to(tl.int64)


@triton.jit
def _term(x, shift, term: tl.constexpr):
    if term == MAGNITUDE:
        x = tl.abs(x)
    elif term == SQUARE:
        x = x * x
    elif term == DEVIATION:
        x = x - shift
        x = x * x
    elif term == LOW:
        x = tl.where(x >= 0, 0.0, x)
    elif term == HIGH:
        x = tl.where(x >= 0, x, 0.0)
    elif term == MANY:
        x = (x >= 0).to(tl.float64)
    return x


@triton.jit(do_not_specialize=["count"])
def sums(x, shifts, out, level, count, term: tl.constexpr, rows: tl.constexpr):
    """Write the sum of each block: sixteen sums of every sixteenth element each, added in
    halves.  ``shifts``: what is taken off the elements of each task."""
    block, known, own = _spans(level, count, rows)
    start, stop = tl.load(own), tl.where(known, tl.load(own + 1), 0)
    lane, shift = tl.arange(0, 16), tl.zeros((rows, 1), tl.float64)
    if term == DEVIATION:
        shift += tl.load(shifts + tl.load(own + 2))[:, None]
    total = tl.zeros((rows, 16), tl.float64)
    for i in range(0, tl.max(stop - start, 0).to(tl.int32), 16):
        at = start[:, None] + (i + lane)[None, :]
        inside = at < stop[:, None]
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
        total += tl.where(inside, _term(values, shift, term), 0.0)
    # Of two terms the order does not matter.
    total = tl.sum(tl.reshape(total, (rows, 2, 8)), 1)
    total = tl.sum(tl.reshape(total, (rows, 2, 4)), 1)
    total = tl.sum(tl.reshape(total, (rows, 2, 2)), 1)
    tl.store(out + block, tl.sum(total, 1) + 0.0, mask=known)


@triton.jit(do_not_specialize=["count"])
def largest(x, out, level, count, rows: tl.constexpr):
    """Put the largest magnitude of each run, as an integer, into ``out``, which is zero before."""
    _, known, own = _spans(level, count, rows)
    start, stop = tl.load(own), tl.where(known, tl.load(own + 1), 0)
    lane = tl.arange(0, 16)
    most = tl.zeros((rows, 16), tl.int32)
    for i in range(0, tl.max(stop - start, 0).to(tl.int32), 16):
        at = start[:, None] + (i + lane)[None, :]
        values = tl.load(x + at, mask=at < stop[:, None], other=0.0)
        most = tl.maximum(most, magnitudes(values))
    tl.atomic_max(out + tl.load(own + 3), tl.max(most, 1), mask=known, sem="relaxed")


@triton.jit
def _of_run(runs, i, inside, column: tl.constexpr):
    return tl.load(runs + 3 * i.to(tl.int64) + column, mask=inside, other=1)


@triton.jit(do_not_specialize=["count", "clip"])
def of_sums(
    found, out, runs, count, clip, kind: tl.constexpr, placed: tl.constexpr, width: tl.constexpr
):
    """Write what is made of the sum of each run, in the type of ``out``: where its head is, or one
    after the other.  ``clip``: the bits of a float64, a number of standard deviations."""
    i = tl.program_id(0) * width + tl.arange(0, width)
    inside = i < count
    total = tl.load(found + i, mask=inside, other=0.0)
    if kind != ROOT:
        total = total / _of_run(runs, i, inside, _N).to(tl.float64)
    if kind != MEAN:
        total = tl.sqrt(total)
    if kind == LIMIT:
        total = total * clip.to(tl.int64).to(tl.float64, bitcast=True)
        total = tl.where(total > 0, total, float("inf"))
    place = i.to(tl.int64)
    if placed:
        place = _of_run(runs, i, inside, _PLACE)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def of_largest(
    found, limits, out, runs, count, most,
    kind: tl.constexpr, clipped: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write the scale of each run.  ``most`` is the number of levels, or the largest number of a
    format; ``limits``: of magnitudes, of each run."""
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
        limit = tl.load(limits + i, mask=inside, other=1.0)
        scale = tl.where(own < limit, own, limit)
    tl.store(out + _of_run(runs, i, inside, _PLACE), scale, mask=inside)


@triton.jit(do_not_specialize=["count"])
def two_means(low, high, many, out, runs, count, width: tl.constexpr):
    """Write two means for each run: of the elements that are negative, and of those that are
    not."""
    i = tl.program_id(0) * width + tl.arange(0, width)
    inside = i < count
    others = tl.load(many + i, mask=inside, other=0.0)
    few = _of_run(runs, i, inside, _OWN).to(tl.float64) - others
    one = tl.full((width,), 1.0, tl.float64)
    low = tl.load(low + i, mask=inside, other=0.0) / tl.where(few > 1, few, one)
    high = tl.load(high + i, mask=inside, other=0.0) / tl.where(others > 1, others, one)
    place = _of_run(runs, i, inside, _PLACE)
    tl.store(out + place, low.to(tl.float32), mask=inside)
    tl.store(out + place + 1, high.to(tl.float32), mask=inside)
