"""The Triton kernels of :mod:`hvd_compress.torch.triton_sums`.

A program takes some blocks of runs of elements.  Sums have the order of
:func:`hvd_compress.kernels.reference.sums`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_codec_kernels import FLOAT8, LINEAR
from .triton_kernels import magnitudes

#: elements that are added up in one go, which defines the sum
SUMMED = tl.constexpr(4096)
#: what sums are of; "low" are the negative elements, "high" all others, which "many" counts
PLAIN, MAGNITUDE, SQUARE, DEVIATION, LOW, HIGH, MANY = (tl.constexpr(i) for i in range(7))
#: what is made of sums
MEAN, ROOT, MEAN_ROOT, LIMIT = (tl.constexpr(i) for i in range(4))


@triton.jit
def _spans(n, length, blocks, count, rows: tl.constexpr):
    """The blocks that a program takes, whether they exist, their runs, and the elements from which
    and up to which they go; a run of ``length`` has so many ``blocks``, of which the last ones may
    be short or empty."""
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
        x = tl.abs(x)
    elif term == SQUARE:
        x = x * x
    elif term == DEVIATION:
        x = x - tl.load(shift)
        x = x * x
    elif term == LOW:
        x = tl.where(x >= 0, 0.0, x)
    elif term == HIGH:
        x = tl.where(x >= 0, x, 0.0)
    elif term == MANY:
        x = (x >= 0).to(tl.float64)
    return x


@triton.jit(do_not_specialize=["n", "length", "blocks", "count"])
def sums(x, shift, out, n, length, blocks, count, term: tl.constexpr, rows: tl.constexpr):
    """Write the sum of each block: sixteen sums of every sixteenth element each, added in
    halves."""
    block, known, _, start, end = _spans(n, length, blocks, count, rows)
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
    _, known, run, start, end = _spans(n, length, blocks, count, rows)
    lane = tl.arange(0, 16)
    most = tl.zeros((rows, 16), tl.int32)
    for i in range(0, tl.minimum(length, SUMMED), 16):
        at = start[:, None] + (i + lane)[None, :]
        own = tl.load(x + at, mask=at < end[:, None], other=0.0)
        most = tl.maximum(most, magnitudes(own))
    tl.atomic_max(out + run, tl.max(most, 1), mask=known, sem="relaxed")


@triton.jit(do_not_specialize=["count", "n", "clip"])
def of_sums(found, out, count, n, clip, kind: tl.constexpr, width: tl.constexpr):
    """Write what is made of each sum over ``n`` elements, in the type of ``out``.  ``clip``: the
    bits of a float64, a number of standard deviations."""
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
    """Write two means for each run: of the elements that are negative, and of those that are
    not."""
    i = tl.program_id(0) * width + tl.arange(0, width)
    inside = i < count
    others = tl.load(many + i, mask=inside, other=0.0)
    few = (tl.minimum(length, n - i * length)).to(tl.float64) - others
    one = tl.full((width,), 1.0, tl.float64)
    low = tl.load(low + i, mask=inside, other=0.0) / tl.where(few > 1, few, one)
    high = tl.load(high + i, mask=inside, other=0.0) / tl.where(others > 1, others, one)
    tl.store(out + 2 * i, low.to(tl.float32), mask=inside)
    tl.store(out + 2 * i + 1, high.to(tl.float32), mask=inside)
