"""Products of matrices and thin factors, and what makes their columns orthonormal.

A :class:`Matrices` says what is computed, in NumPy, which also serves if nothing is compiled.  The
compiled loops give the same bits, in one pass over memory each, for any number of threads.
Matrices are in host memory, float32 and contiguous, of any library.

A matrix M has n rows and m columns.  Its factors are P^T, of ``rank`` rows and n columns, and Q^T,
of m columns.  The factors of all matrices are end to end in a flat array each.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.kernels import is_compiled, native, threads
from hvd_compress.kernels.arrays import Array, Column

_NONE = np.empty(0, np.int64)
#: elements of a row, and rows, that are added up in one go
_SUMMED, _ROWS, _LANES = 4096, 256, 16
_TINY = np.float32(1e-30)
#: products that are smaller are in range, and so are their sums
_LARGE = 2.0**126


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix: its first dimension, for instance the output
    channels of a convolution, by all others."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


class Matrices:
    """Matrices of a bucket.

    Args:
        shapes: rows and columns of each, which are not zero.
        ranks: rows of the factors of each.

    Attributes:
        of_p, of_q: the number of elements of all P, and of all Q.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], ranks: Sequence[int]) -> None:
        self._dims = np.array(
            [(n, m, rank) for (n, m), rank in zip(shapes, ranks, strict=True)], np.int64
        )
        #: of each P, and of each row of all Q^T
        self._p_shapes = np.ascontiguousarray(self._dims[:, [2, 0]])
        self._q_lengths = np.repeat(self._dims[:, 1], self._dims[:, 2]).tolist()
        self.of_p, self.of_q = (int((self._dims[:, i] * self._dims[:, 2]).sum()) for i in (0, 1))

    def left(self, x: Column, q: np.ndarray, p: np.ndarray, *added: Column) -> np.ndarray:
        """Write (M Q)^T to ``p``, with M = x, or M = x + y.

        ``added`` are two columns then: y, and the place where M is written, which may be x.  Return
        of which M all elements are finite (bool); for one that is not all of ``p`` is NaN.

        4096 elements of a row make one sum.  It has 16 sums of every sixteenth product each, of
        which the second half is added to the first until one is left.  Such sums are added in their
        order.
        """
        if is_compiled():
            columns = [column.addresses for column in (x, *added)] + [_NONE] * (2 - len(added))
            return native.low_rank.left(self._dims, *columns, q, p, threads())
        finite = []
        with np.errstate(over="ignore", invalid="ignore"):
            if added:
                for a, b, out in zip(*map(self._matrices, (x, *added)), strict=True):
                    np.add(a, b, out=out)
                x = added[1]
            for matrix, its_p, its_q in zip(self._matrices(x), self._p(p), self._q(q), strict=True):
                for row, column in zip(its_p, its_q, strict=True):
                    row[:] = _row_sums(matrix * column)
                finite.append(bool(np.isfinite(matrix).all()))
                if not finite[-1]:
                    its_p.fill(np.nan)
        return np.array(finite)

    def right(self, x: Column, p: np.ndarray, q: np.ndarray) -> None:
        """Write (M^T P)^T to ``q``: products with 256 rows are added in their order, and such sums
        in theirs."""
        if is_compiled():
            native.low_rank.right(self._dims, x.addresses, p, q, threads())
            return
        with np.errstate(over="ignore", invalid="ignore"):
            for matrix, its_p, its_q in zip(self._matrices(x), self._p(p), self._q(q), strict=True):
                for column, row in zip(its_p, its_q, strict=True):
                    row[:] = _column_sums(matrix, column)

    def product(
        self,
        p: np.ndarray,
        q: np.ndarray,
        out: Column,
        sent: Column | None = None,
        own: np.ndarray | None = None,
    ) -> None:
        """Write P Q^T to ``out``, the first product first, and P ``own``^T to ``sent``."""
        fine = np.ones(len(self._dims), bool)
        own = q if own is None else own
        self.settle(None, None, p, q, own, out=out, sent=sent, finite=fine)

    def settle(
        self,
        x: Column | None,
        y: Column | None,
        p: np.ndarray,
        q: np.ndarray,
        own: np.ndarray,
        *,
        out: Column,
        sent: Column | None,
        finite: np.ndarray,
    ) -> None:
        """Write P Q^T to ``out``, which may be ``x``.  If they are there, also write x - P own^T to
        ``y`` for matrices that are ``finite``, and P own^T to ``sent``."""
        if is_compiled():
            columns = [_addresses(column) for column in (x, y, out, sent)]
            native.low_rank.settle(
                self._dims, *columns[:2], p, q, own, *columns[2:], finite, threads()
            )
            return
        matrices = [self._matrices(column) for column in (x, y, out, sent)]
        factors = self._p(p), self._q(q), self._q(own)
        with np.errstate(over="ignore", invalid="ignore"):
            for *factor, fine, a, b, mean, to in zip(*factors, finite, *matrices, strict=True):
                its_p, its_q, its_own = factor
                mine = _product(its_p, its_own)
                if to is not None:
                    to[:] = mine
                if b is not None and fine:
                    b[:] = a - mine
                mean[:] = _product(its_p, its_q)

    def orthonormal(self, p: np.ndarray) -> None:
        """Make the rows of each P^T orthonormal, in place; they span the same space.

        Gram-Schmidt, row by row, each row twice, since once is not enough where rows are nearly
        alike, in float64 and rounded after each turn.
        """
        if is_compiled():
            native.low_rank.orthonormal(self._p_shapes, p, threads())
            return
        with np.errstate(over="ignore", invalid="ignore"):
            for rows in self._p(p):
                for k, row in enumerate(rows):
                    for _ in range(2):
                        if k:
                            shares = [_dot(row, rows[j]) for j in range(k)]
                            known = shares[0] * rows[0].astype(np.float64)
                            for j in range(1, k):
                                known = known + shares[j] * rows[j].astype(np.float64)
                            row[:] = row - known
                        row[:] = _of_unit_length(row)

    def unit(self, q: np.ndarray, out: np.ndarray) -> None:
        """Write the rows of each Q^T at length 1; zeros stay zeros."""
        if is_compiled():
            native.low_rank.unit(self._q_lengths, q, out)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            for rows, its_out in zip(self._q(q), self._q(out), strict=True):
                for row, to in zip(rows, its_out, strict=True):
                    to[:] = _of_unit_length(row)

    def _p(self, flat: np.ndarray) -> Iterator[np.ndarray]:
        return self._factors(flat, 0)

    def _q(self, flat: np.ndarray) -> Iterator[np.ndarray]:
        return self._factors(flat, 1)

    def _factors(self, flat: np.ndarray, side: int) -> Iterator[np.ndarray]:
        """The factor of each matrix, as a view."""
        at = 0
        for dims in self._dims.tolist():
            width, rank = dims[side], dims[2]
            yield flat[at : at + rank * width].reshape(rank, width)
            at += rank * width

    def _matrices(self, column: Column | None) -> list[Any]:
        if column is None:
            return [None] * len(self._dims)
        pairs = zip(column.on_host().arrays, self._dims.tolist(), strict=True)
        return [x.reshape(n, m) for x, (n, m, _) in pairs]


class PowerStep(abc.ABC):
    """A step of the power method on the matrices of a bucket, with its memory.

    Each rank has three turns.  All P, and then all Q, are added up over the ranks in between.
    Turns take the columns of gradients, where averages are written, and factors Q^T, and that of
    residuals if there is error feedback.  The sum M = gradient + residual is written where the
    average will be.

    Args:
        shapes, ranks: as of :class:`Matrices`.
        size: the number of ranks that exchange.
        like: an array in the memory of the matrices.

    Attributes:
        MOST_RANK: the largest rank that is taken; ``None`` for any.
        rows, own: what is sent, all P^T and all Q^T.
    """

    MOST_RANK: ClassVar[int | None] = None
    rows: Array
    own: Array

    @abc.abstractmethod
    def left(self, columns: Sequence[Column]) -> Array:
        """Return what is sent first: all P, transposed."""

    @abc.abstractmethod
    def right(self, columns: Sequence[Column], total: Array) -> Array:
        """Return what is sent then, given the sum of all ranks' P: all Q, transposed."""

    @abc.abstractmethod
    def settle(self, columns: Sequence[Column], total: Array) -> np.ndarray | None:
        """Write averages and states, given the sum of all ranks' Q; return of which matrices the
        average is finite (bool).  States of others stay as they are; a GPU sees to them by itself,
        and returns ``None``."""


class PowerStepOnHost(PowerStep):
    """All arrays are in host memory."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], ranks: Sequence[int], size: int, like: Array
    ) -> None:
        self._matrices, self._shapes = Matrices(shapes, ranks), shapes
        self._ranks, self._size = np.array(ranks), np.float32(size)
        pairs = list(zip(shapes, ranks, strict=True))
        self._starts_of_p = np.cumsum([0, *(n * rank for (n, _), rank in pairs)])
        self._starts_of_q = np.cumsum([0, *(m * rank for (_, m), rank in pairs)])
        #: columns of the rows of all Q^T, and where they start
        self._lengths = np.repeat([m for _, m in shapes], ranks)
        self._rows_of_q = np.cumsum([0, *self._lengths[:-1]])
        self.rows, self._p = np.empty((2, self._matrices.of_p), np.float32)
        self._q, self.own, self._new = np.empty((3, self._matrices.of_q), np.float32)

    def left(self, columns: Sequence[Column]) -> Array:
        x, out, factors, *residuals = columns
        np.concatenate(factors.on_host().arrays, out=self._new)
        # Its scale means nothing to the result, and could take the product out of range.
        self._matrices.unit(self._new, self._q)
        self._matrices.left(x, self._q, self.rows, *((*residuals, out) if residuals else ()))
        return self.rows

    def right(self, columns: Sequence[Column], total: Array) -> Array:
        x, out, _, *residuals = columns
        np.divide(total, self._size, out=self._p)
        self._matrices.orthonormal(self._p)
        self._matrices.right(out if residuals else x, self._p, self.own)
        return self.own

    def settle(self, columns: Sequence[Column], total: Array) -> np.ndarray:
        _, out, factors, *residuals = columns
        factors, left = factors.on_host(), residuals[0] if residuals else None
        np.divide(total, self._size, out=self._new)
        finite = self._finite()
        self._matrices.settle(
            *(out, left, self._p, self._new, self.own), out=out, sent=None, finite=finite
        )
        old = np.concatenate(factors.arrays)
        alive = np.add.reduceat(np.abs(self._new), self._rows_of_q) > 0
        alive = np.repeat(alive.astype(np.float32), self._lengths)
        with np.errstate(invalid="ignore"):
            new = alive * self._new + (1 - alive) * old  # a zero would stay zero for ever
        cuts = np.split(new, self._starts_of_q[1:-1])
        for factor, its_new, fine in zip(factors.arrays, cuts, finite, strict=True):
            if fine:
                factor[:] = its_new
        return finite

    def _finite(self) -> np.ndarray:
        """Return of which matrices the average is finite."""
        p = np.maximum.reduceat(np.abs(self._p), self._starts_of_p[:-1]).astype(np.float64)
        q = np.maximum.reduceat(np.abs(self._new), self._starts_of_q[:-1]).astype(np.float64)
        finite = p * q * self._ranks < _LARGE
        for i in np.flatnonzero(~finite & np.isfinite(p) & np.isfinite(q)).tolist():
            finite[i] = self._is_product_finite(i)
        return finite

    def _is_product_finite(self, i: int) -> bool:
        one, mean = Matrices([self._shapes[i]], [self._ranks[i]]), np.empty(self._shapes[i], "f4")
        p, q = (slice(*each[i : i + 2]) for each in (self._starts_of_p, self._starts_of_q))
        one.product(self._p[p], self._new[q], Column([mean]))
        return bool(np.isfinite(mean).all())


#: by this name :func:`hvd_compress.kernels.loops_of` leads to the step, here and on a GPU
STEP = PowerStepOnHost


def _addresses(column: Column | None) -> np.ndarray:
    return _NONE if column is None else column.addresses


def _halved(lanes: np.ndarray) -> np.ndarray:
    """The sum along the last axis, of 16 elements."""
    while (half := lanes.shape[-1] // 2) > 0:
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _row_sums(products: np.ndarray) -> np.ndarray:
    """The sum of each row, in the order of :meth:`Matrices.left`."""
    total = np.zeros(len(products), products.dtype)
    for start in range(0, products.shape[1], _SUMMED):
        run = products[:, start : start + _SUMMED]
        lanes = np.zeros((len(run), _LANES), run.dtype)
        for at in range(0, run.shape[1], _LANES):
            part = run[:, at : at + _LANES]
            lanes[:, : part.shape[1]] += part
        total = total + _halved(lanes) if start else _halved(lanes)
    return total


def _column_sums(matrix: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The sum of the rows times their element of ``column``, in the order of
    :meth:`Matrices.right`."""
    total = np.zeros(matrix.shape[1], matrix.dtype)
    for start in range(0, len(matrix), _ROWS):
        run = np.zeros_like(total)
        for i in range(start, min(start + _ROWS, len(matrix))):
            run += column[i] * matrix[i]
        total = total + run if start else run
    return total


def _product(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    found = p[0][:, None] * q[0]
    for k in range(1, len(p)):
        found = found + p[k][:, None] * q[k]
    return found


def _dot(x: np.ndarray, y: np.ndarray) -> np.float64:
    return _row_sums((x.astype(np.float64) * y.astype(np.float64))[None])[0]


def _of_unit_length(row: np.ndarray) -> np.ndarray:
    return row / np.maximum(np.float32(np.sqrt(_dot(row, row))), _TINY)
