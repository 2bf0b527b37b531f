"""The Triton kernels of :mod:`hvd_compress.torch.triton.low_rank`.

Sums have the order that :mod:`hvd_compress.kernels.low_rank` defines.  A program reads its own
tensor's row of the table of matrices.  There ``columns`` is the largest rank of all, or a power of
two above it.  Products and sums must not be contracted, so kernels are launched with
``enable_fp_fusion=False``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .kernels import INFINITY, magnitudes
from .task_kernels import SUMMED, in_range, taken

#: rows that are added up in one go
ROWS = tl.constexpr(256)
#: the arrays in the table of addresses
X, OUT, RESIDUAL, FACTOR, ARRAYS = (tl.constexpr(i) for i in range(5))

# The table of matrices has rows, columns, rank, and where P^T and Q^T begin.
_N, _M, _RANK, _P, _Q, _FIELDS = (tl.constexpr(i) for i in range(6))
#: loads of a sum that are under way at a time
_AHEAD = tl.constexpr(8)
_TINY = tl.constexpr(1e-30)
#: products that are smaller are in range, and so are their sums
_LARGE = tl.constexpr(2.0**126)


@triton.jit
def _field(matrices, t, field: tl.constexpr):
    return tl.load(matrices + t * _FIELDS + field)


@triton.jit
def _short(matrices, t, field: tl.constexpr):
    return _field(matrices, t, field).to(tl.int32)


@triton.jit
def _array(addresses, t, array: tl.constexpr):
    return tl.load(addresses + t * ARRAYS + array).to(tl.pointer_type(tl.float32))


@triton.jit
def _halved(x, lines: tl.constexpr):
    """The sums of lines of sixteen elements."""
    # Of two terms the order does not matter.
    x = tl.sum(tl.reshape(x, (lines, 2, 8)), 1)
    x = tl.sum(tl.reshape(x, (lines, 2, 4)), 1)
    x = tl.sum(tl.reshape(x, (lines, 2, 2)), 1)
    return tl.sum(x, 1)


@triton.jit
def _in_order(total, parts, columns: tl.constexpr, count: tl.constexpr):
    """``total``, to which the parts of each line are added, the first one first."""
    parts = tl.reshape(parts, (columns, count))
    number = tl.arange(0, count)[None, :]
    for i in tl.static_range(count):
        total += tl.sum(tl.where(number == i, parts, 0.0), 1)
    return total


@triton.jit
def _dots(x, rows, count, n, columns: tl.constexpr, chunks: tl.constexpr):
    """The products (float64) of a row of ``n`` elements with each of ``count`` rows."""
    lines: tl.constexpr = columns * chunks
    line, lane = tl.arange(0, lines), tl.arange(0, 16)[None, :]
    row, chunk = line // chunks, line % chunks
    own = rows + row[:, None] * n
    total = tl.zeros((columns,), tl.float64)
    for first in range(0, n, chunks * SUMMED):
        start = first + chunk * SUMMED
        stop = tl.where(row < count, tl.minimum(start + SUMMED, n), 0)[:, None]
        sums = tl.zeros((lines, 16), tl.float64)
        for at in range(0, tl.minimum(n - first, SUMMED), 16 * _AHEAD):
            for i in tl.static_range(_AHEAD):
                place = start[:, None] + (at + 16 * i) + lane
                inside = place < stop
                a = tl.load(x + place, mask=inside, other=0.0).to(tl.float64)
                sums += a * tl.load(own + place, mask=inside, other=0.0).to(tl.float64)
        total = _in_order(total, _halved(sums, lines), columns, chunks)
    return total


@triton.jit
def _to_unit(row, out, n, chunks: tl.constexpr, width: tl.constexpr):
    """Write a row at length 1; zeros stay zeros."""
    length = tl.sqrt(_dots(row, row, 1, n, 1, chunks)).to(tl.float32)
    length = tl.sum(tl.where(length < _TINY, _TINY, length))  # which is one
    tl.debug_barrier()  # others have read what is written now
    for at in range(0, n, width):
        place = at + tl.arange(0, width)
        inside = place < n
        x = tl.load(row + place, mask=inside, other=0.0)
        tl.store(out + place, tl.div_rn(x, tl.zeros_like(x) + length), mask=inside)
    tl.debug_barrier()


@triton.jit
def unit(
    addresses, matrices, rows, q, largest, chunks: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    """Write a row of a factor at length 1, and let ``largest`` of its tensor be zero."""
    t, k = taken(rows)
    m = _short(matrices, t, _M)
    out = q + _field(matrices, t, _Q) + k * m
    _to_unit(_array(addresses, t, FACTOR) + k * m, out, m, chunks, width)
    tl.store(largest + t, 0, mask=k == 0)


@triton.jit
def left(
    addresses, matrices, blocks, q, p, largest,
    adds: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write some rows of P = M Q, transposed, and M = x + residual, if it ``adds``; ``largest``
    becomes M's largest magnitude."""
    t, block = taken(blocks)
    n, m, rank = _short(matrices, t, _N), _short(matrices, t, _M), _short(matrices, t, _RANK)
    x = _array(addresses, t, X)
    lines: tl.constexpr = columns * rows
    line, lane = tl.arange(0, lines), tl.arange(0, 16)[None, :]
    k, i = line // rows, block * rows + line % rows
    known = (k < rank) & (i < n)
    factor = q + _field(matrices, t, _Q) + k[:, None] * m
    total, most = tl.zeros((lines,), tl.float32), tl.zeros((lines, 16), tl.int32)
    for start in range(0, m, SUMMED):
        stop = tl.minimum(start + SUMMED, m)
        if adds:
            y, out = _array(addresses, t, RESIDUAL), _array(addresses, t, OUT)
            row = block * rows + tl.arange(0, rows)[:, None]
            for at in range(start, stop, width):
                j = at + tl.arange(0, width)[None, :]
                place, inside = row.to(tl.int64) * m + j, (row < n) & (j < stop)
                own = tl.load(x + place, mask=inside) + tl.load(y + place, mask=inside)
                tl.debug_barrier()  # x and out may be one
                tl.store(out + place, own, mask=inside)
            tl.debug_barrier()
            x = out
        own = x + i.to(tl.int64)[:, None] * m
        sums = tl.zeros((lines, 16), tl.float32)
        for at in range(start, stop, 16 * _AHEAD):
            for ahead in tl.static_range(_AHEAD):
                j = at + 16 * ahead + lane
                inside = known[:, None] & (j < stop)
                a = tl.load(own + j, mask=inside, other=0.0)
                sums += a * tl.load(factor + j, mask=inside, other=0.0)
                most = tl.maximum(most, magnitudes(a))
        total += _halved(sums, lines)
        x = _array(addresses, t, X)
    tl.store(p + _field(matrices, t, _P) + k * n + i, total, mask=known)
    tl.atomic_max(largest + t, tl.max(most), sem="relaxed")


@triton.jit
def spoil(matrices, largest, p, width: tl.constexpr):
    """Let all of P be NaN if an element of M is not finite."""
    t = tl.program_id(0)
    if tl.load(largest + t) >= INFINITY:
        count = _short(matrices, t, _N) * _short(matrices, t, _RANK)
        own = p + _field(matrices, t, _P)
        for at in range(0, count, width):
            place = at + tl.arange(0, width)
            tl.store(own + place, float("nan"), mask=place < count)


@triton.jit(do_not_specialize=["total"])
def orthonormal(
    matrices, total, p, shares, largest, size,
    columns: tl.constexpr, chunks: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write the mean of P, given its sum over ``size`` ranks, with orthonormal columns: those of
    Gram-Schmidt, one after the other, each twice.  ``largest`` becomes its largest magnitude."""
    t = tl.program_id(0)
    n, rank, start = _short(matrices, t, _N), _short(matrices, t, _RANK), _field(matrices, t, _P)
    total, p, shares = total + start, p + start, shares + t * columns
    count, lane = n * rank, tl.arange(0, width)
    for at in range(0, count, width):
        place = at + lane
        x = tl.load(total + place, mask=place < count, other=0.0)
        tl.store(p + place, tl.div_rn(x, tl.zeros_like(x) + size), mask=place < count)
    tl.debug_barrier()
    for k in range(0, rank):
        row = p + k * n
        for _ in range(0, 2):
            if k > 0:
                tl.store(shares + tl.arange(0, columns), _dots(row, p, k, n, columns, chunks))
                tl.debug_barrier()
                for at in range(0, n, width):
                    place = at + lane
                    inside = place < n
                    first = tl.load(p + place, mask=inside, other=0.0).to(tl.float64)
                    known = tl.load(shares) * first
                    for j in range(1, k):
                        other = tl.load(p + j * n + place, mask=inside, other=0.0)
                        known += tl.load(shares + j) * other.to(tl.float64)
                    x = tl.load(row + place, mask=inside, other=0.0).to(tl.float64)
                    tl.store(row + place, (x - known).to(tl.float32), mask=inside)
                tl.debug_barrier()
            _to_unit(row, row, n, chunks, width)
    most = tl.zeros((width,), tl.int32)
    for at in range(0, count, width):
        place = at + lane
        most = tl.maximum(most, magnitudes(tl.load(p + place, mask=place < count, other=0.0)))
    tl.store(largest + t, tl.max(most))


@triton.jit
def right(
    addresses, matrices, blocks, p, q, array: tl.constexpr,
    columns: tl.constexpr, runs: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write some columns of Q^T = P^T M, where M is an ``array`` of the table."""
    t, block = taken(blocks)
    n, m, rank = _short(matrices, t, _N), _short(matrices, t, _M), _short(matrices, t, _RANK)
    x, p = _array(addresses, t, array), p + _field(matrices, t, _P)
    lines: tl.constexpr = columns * runs
    line, j = tl.arange(0, lines)[:, None], block * width + tl.arange(0, width)[None, :]
    k, run = line // runs, line % runs
    total = tl.zeros((columns, width), tl.float32)
    for first in range(0, n, runs * ROWS):
        start = first + run * ROWS
        sums = tl.zeros((lines, width), tl.float32)
        for at in range(0, tl.minimum(n - first, ROWS), _AHEAD):
            for ahead in tl.static_range(_AHEAD):
                i = start + at + ahead
                known = (k < rank) & (i < n)
                a = tl.load(x + i.to(tl.int64) * m + j, mask=known & (j < m), other=0.0)
                sums += tl.load(p + k * n + i, mask=known, other=0.0) * a
        parts, number = tl.reshape(sums, (columns, runs, width)), tl.arange(0, runs)[None, :, None]
        for i in tl.static_range(runs):
            total += tl.sum(tl.where(number == i, parts, 0.0), 1)
    k = tl.arange(0, columns)[:, None]
    tl.store(q + _field(matrices, t, _Q) + k * m + j, total, mask=(k < rank) & (j < m))


@triton.jit(do_not_specialize=["total"])
def decide(
    matrices, total, q, alive, largest, unsure, overflows, size,
    columns: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write the mean of Q, given its sum over ``size`` ranks, and which of its columns are not
    zero.

    Also write whether P Q^T is not finite, given the largest magnitude of P, or one has to look.
    """
    t = tl.program_id(0)
    m, rank, start = _short(matrices, t, _M), _short(matrices, t, _RANK), _field(matrices, t, _Q)
    k = tl.arange(0, columns)[:, None]
    most = tl.zeros((columns, width), tl.int32)
    for at in range(0, m, width):
        j = at + tl.arange(0, width)[None, :]
        place, inside = start + k * m + j, (k < rank) & (j < m)
        x = tl.load(total + place, mask=inside, other=0.0)
        x = tl.div_rn(x, tl.zeros_like(x) + size)
        tl.store(q + place, x, mask=inside)
        most = tl.maximum(most, magnitudes(x))
    of_rows = tl.max(most, 1)
    is_alive = (of_rows > 0) & (of_rows <= INFINITY)
    tl.store(alive + t * columns + tl.arange(0, columns), is_alive.to(tl.float32))
    of_p, of_q = tl.load(largest + t), tl.max(of_rows)
    product = of_p.to(tl.float32, bitcast=True).to(tl.float64)
    product = product * of_q.to(tl.float32, bitcast=True).to(tl.float64) * rank.to(tl.float64)
    is_large, is_finite = (product < _LARGE) == 0, (of_p < INFINITY) & (of_q < INFINITY)
    tl.store(unsure + t, (is_large & is_finite).to(tl.int32))
    tl.store(overflows + t, (is_large & (is_finite == 0)).to(tl.int32))


@triton.jit
def _product(p, q, at, inside, n, m, rank):
    """Elements of P Q^T, the first product first."""
    row = at // m
    column = at - row * m
    found = tl.load(p + row, mask=inside, other=0.0) * tl.load(q + column, mask=inside, other=0.0)
    for k in range(1, rank):
        its_p = tl.load(p + k * n + row, mask=inside, other=0.0)
        found = found + its_p * tl.load(q + k * m + column, mask=inside, other=0.0)
    return found


@triton.jit
def look(matrices, blocks, p, q, unsure, overflows, width: tl.constexpr):
    """Find out whether a block of P Q^T is finite, where it is not known."""
    t, block = taken(blocks)
    if tl.load(unsure + t) != 0:
        n, m, rank = _short(matrices, t, _N), _short(matrices, t, _M), _short(matrices, t, _RANK)
        p, q, lane = p + _field(matrices, t, _P), q + _field(matrices, t, _Q), tl.arange(0, width)
        inside = lane < n * m - block * width
        found = _product(p, q, block * width + lane, inside, n, m, rank)
        if tl.max(magnitudes(found)) >= INFINITY:
            tl.atomic_max(overflows + t, 1, sem="relaxed")


@triton.jit
def settle(
    addresses, matrices, blocks, p, q, own, alive, overflows, array: tl.constexpr,
    keeps: tl.constexpr, columns: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Write a block of the average P Q^T.

    If that is finite, also write the residual M - P ``own``^T, if it ``keeps`` one, and the factor.
    Columns stay that would be zero for ever.  M is an ``array`` of the table.  Otherwise states
    stay, within range.
    """
    t, block = taken(blocks)
    n, m, rank = _short(matrices, t, _N), _short(matrices, t, _M), _short(matrices, t, _RANK)
    p, start, lane = p + _field(matrices, t, _P), _field(matrices, t, _Q), tl.arange(0, width)
    q, own, at = q + start, own + start, block * width + lane
    inside = lane < n * m - block * width
    fine = tl.load(overflows + t) == 0
    if keeps:
        residual = _array(addresses, t, RESIDUAL) + at
        if fine:
            sent = _product(p, own, at, inside, n, m, rank)
            left_over = tl.load(_array(addresses, t, array) + at, mask=inside) - sent
        else:
            left_over = in_range(tl.load(residual, mask=inside))
        tl.store(residual, left_over, mask=inside)
        tl.debug_barrier()  # M is where the average will be
    tl.store(_array(addresses, t, OUT) + at, _product(p, q, at, inside, n, m, rank), mask=inside)
    if block * width < m:
        factor, inside = _array(addresses, t, FACTOR), inside & (at < m)
        for k in range(0, rank):
            lives = tl.load(alive + t * columns + k)
            old = tl.load(factor + k * m + at, mask=inside)
            new = lives * tl.load(q + k * m + at, mask=inside) + (1 - lives) * old
            tl.store(factor + k * m + at, tl.where(fine, new, in_range(old)), mask=inside)
