"""Products of matrices with thin factors, and orthonormal rows, over any backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.base import Array
from hvd_compress.kernels import Column
from hvd_compress.kernels.low_rank import Matrices

_TINY = 1e-30


def left(xp: Any, q: Array, matrix: Array) -> Array:
    """Return (M Q)^T, given Q^T: of a matrix, or of each of a stack."""
    on_host = _on_host(xp, q, matrix)
    if on_host is None:
        return xp.matmul(q, xp.transpose(matrix))
    factor, x = on_host
    (*stack, rank, _), n = xp.shape(q), xp.shape(matrix)[-2]
    matrices, columns = _matrices(stack, n, xp.shape(q)[-1], rank, x)
    found = np.empty(matrices.of_p, np.float32)
    matrices.left(columns, factor, found)
    return xp.reshape(xp.from_numpy(found, matrix), (*stack, rank, n))


def right(xp: Any, p: Array, matrix: Array) -> Array:
    """Return (M^T P)^T, given P^T."""
    on_host = _on_host(xp, p, matrix)
    if on_host is None:
        return xp.matmul(p, matrix)
    factor, x = on_host
    (*stack, rank, n), m = xp.shape(p), xp.shape(matrix)[-1]
    matrices, columns = _matrices(stack, n, m, rank, x)
    found = np.empty(matrices.of_q, np.float32)
    matrices.right(columns, factor, found)
    return xp.reshape(xp.from_numpy(found, matrix), (*stack, rank, m))


def product(xp: Any, p: Array, q: Array) -> Array:
    """Return P Q^T, given P^T and Q^T."""
    on_host = _on_host(xp, p, q)
    if on_host is None:
        return xp.matmul(xp.transpose(p), q)
    its_p, its_q = on_host
    (*stack, rank, n), m = xp.shape(p), xp.shape(q)[-1]
    found = np.empty(math.prod(stack) * n * m, np.float32)
    matrices, columns = _matrices(stack, n, m, rank, found)
    matrices.product(its_p, its_q, columns)
    return xp.reshape(xp.from_numpy(found, p), (*stack, n, m))


def orthonormal_rows(xp: Any, rows: Array) -> Array:
    """Return orthonormal rows that span the same space, of a matrix or of each of a stack.

    Gram-Schmidt, row by row.  Each row is treated twice, since once is not enough for rows that are
    nearly alike.
    """
    if (on_host := _on_host(xp, rows)) is not None:
        *stack, rank, n = xp.shape(rows)
        found = on_host[0].copy()
        Matrices([(n, 1)] * math.prod(stack), [rank] * math.prod(stack)).orthonormal(found)
        return xp.reshape(xp.from_numpy(found, rows), xp.shape(rows))
    basis: list[Array] = []
    for i in range(xp.shape(rows)[-2]):
        row = rows[..., i : i + 1, :]
        for _ in range(2):
            if basis:
                known = xp.concat(basis, -2)
                row = row - xp.matmul(xp.matmul(row, xp.transpose(known)), known)
            row = of_unit_length(xp, row)
        basis.append(row)
    return xp.concat(basis, -2)


def of_unit_length(xp: Any, rows: Array) -> Array:
    """Return each row of a matrix, or of a stack of them, at length 1; zeros stay zeros."""
    if (on_host := _on_host(xp, rows)) is not None:
        *stack, rank, m = xp.shape(rows)
        found = np.empty_like(on_host[0])
        Matrices([(1, m)] * math.prod(stack), [rank] * math.prod(stack)).unit(on_host[0], found)
        return xp.reshape(xp.from_numpy(found, rows), xp.shape(rows))
    wide = xp.cast(rows, "float64")  # squares are in range
    ones = xp.transpose(xp.full_like(wide[..., :1, :], 1.0))
    norms = xp.cast(xp.matmul(wide * wide, ones) ** 0.5, xp.dtype(rows))
    return rows / xp.maximum(norms, xp.full_like(norms, _TINY))


def _on_host(xp: Any, *arrays: Array) -> list[np.ndarray] | None:
    """Return arrays flat, in memory for the loops of :mod:`hvd_compress.kernels.low_rank`; ``None``
    if one is not float32, or not in host memory."""
    if xp.traces or any(xp.dtype(x) != "float32" for x in arrays):
        return None
    found = []
    for x in arrays:
        flat = xp.reshape(x, (-1,))
        if xp.address(flat) is None:
            flat = xp.copy(flat)
        if xp.loops(flat) != "hvd_compress.kernels" or not xp.size(flat):
            return None
        found.append(xp.to_numpy(flat))
    return found


def _matrices(
    stack: Sequence[int], n: int, m: int, rank: int, x: np.ndarray
) -> tuple[Matrices, Column]:
    """Return a stack of matrices, and where they are in ``x``."""
    count = math.prod(stack)
    return Matrices([(n, m)] * count, [rank] * count), Column(np.split(x, count), [n * m] * count)


def without_zeros(xp: Any, new: Array, old: Array) -> Array:
    """Return the rows of ``new``; zeros are replaced by the rows of ``old``, or they would stay
    zero for ever."""
    ones = xp.transpose(xp.full_like(new[:1], 1.0))
    alive = xp.cast(xp.matmul(xp.abs(new), ones) > 0, xp.dtype(new))
    return alive * new + (1 - alive) * old


def rows_by_qr(xp: Any, rows: Array) -> Array:
    """Return orthonormal rows that span the same space, of a matrix."""
    return xp.transpose(xp.orthonormal_columns(xp.transpose(rows)))
