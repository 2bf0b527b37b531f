"""A matrix as the product of two thin ones, by one step of the power method."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.coding.base import Coding, Decoded, Encoded
from hvd_compress.coding.whole import whole
from hvd_compress.config import check_choice, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.kernels import Column
from hvd_compress.kernels.low_rank import Matrices
from hvd_compress.operators.random_k import shared_generator

_TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class factors(Coding, name="factors"):
    """For a matrix M of n rows (the first dimension) and m columns (all others) send
    P = orthonormal columns of M Q, and M^T P; receivers read P P^T M.  ``context.shape`` is the
    shape of the tensor.

    Options:
        rank: columns of P and Q; at most min(n, m).
        warm_start: the next message begins with Q = M^T P instead of a random one, so that messages
            together are a power iteration.  Random ones come from (seed, step, tensor).
        orthogonalise: "gram_schmidt", a row after the other and each twice, or "qr".

    State: with ``warm_start`` ``factor`` Q^T.

    Reference: Vogels, Karimireddy and Jaggi, NeurIPS 2019.

    A matrix of rank 1 arrives as it is:

    >>> coding, matrix = factors(rank=1), np.outer([1.0, 2.0], [3.0, 4.0, 5.0])
    >>> x, context = matrix.ravel(), Context(shape=matrix.shape)
    >>> state = {"factor": np.ones(3)}
    >>> message, sent, state = coding.encode(x, state, context)
    >>> coding.decode([message], x, context).total.round(6), state["factor"].round(3)
    (array([ 3.,  4.,  5.,  6.,  8., 10.]), array([ 6.708,  8.944, 11.18 ]))
    """

    rank: int = 1
    warm_start: bool = True
    orthogonalise: str = "gram_schmidt"

    def __post_init__(self) -> None:
        if not is_whole(self.rank) or self.rank < 1:
            raise ConfigError(f"rank must be a number of columns, 1 or more; got {self.rank!r}")
        check_choice("warm_start", self.warm_start, (True, False))
        check_choice("orthogonalise", self.orthogonalise, ("gram_schmidt", "qr"))

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("factor",) if self.warm_start else ()

    def varies(self, n: int, context: Context) -> bool:
        return False

    @property
    def orthonormal(self) -> Callable[[Any, Array], Array]:
        """A function that returns orthonormal rows, of a matrix or of each of a stack."""
        return _by_qr if self.orthogonalise == "qr" else orthonormal_rows

    def rank_of(self, shape: tuple[int, ...]) -> int:
        """Return the rank of P for a tensor of ``shape``."""
        return min(*matrix_shape(shape), self.rank)

    def first(self, x: Array, state: State, context: Context) -> Array:
        """Return Q^T as it is before a message of the flat ``x``, not yet of unit length."""
        xp, rank = backend_of(x), self.rank_of(context.shape)
        m = matrix_shape(context.shape)[1]
        factor = state["factor"] if self.warm_start else _random(x, rank * m, context)
        return xp.reshape(factor, (rank, m))

    def next(self, new: Array, old: Array, state: State) -> State:
        """Return the state for the next message, given M^T P and Q, transposed."""
        xp = backend_of(new)
        if not self.warm_start:
            return state
        return {"factor": xp.reshape(without_zeros(xp, new, old), (-1,))}

    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        xp = backend_of(x)
        shape = matrix_shape(context.shape)
        if not math.prod(shape):
            return whole().encode(x, state, context)
        # Products of matrices depend in their last bits on where in memory these begin.
        matrix, old = xp.reshape(xp.copy(x), shape), self.first(x, state, context)
        p = self.orthonormal(xp, left(xp, of_unit_length(xp, old), matrix))
        own = right(xp, p, matrix)
        both = xp.concat([xp.reshape(p, (-1,)), xp.reshape(own, (-1,))])
        message, _, _ = whole().encode(both, {}, context)
        sent = xp.reshape(product(xp, p, own), (-1,))
        return Encoded(message, sent, self.next(own, old, state))

    def decode(
        self,
        messages: Sequence[Array],
        like: Array,
        context: Context,
        ranks: Sequence[int] | None = None,
    ) -> Decoded:
        xp = backend_of(like)
        n, m = matrix_shape(context.shape)
        if n * m == 0:
            return whole().decode(messages, like, context, ranks)
        rank = self.rank_of(context.shape)
        both, total = xp.zeros(rank * (n + m), like), xp.zeros(n * m, like)
        for sender, message in zip(ranks or range(len(messages)), messages, strict=True):
            found = whole().decode([message], both, context, [sender]).total
            p = xp.reshape(xp.copy(found[: rank * n]), (rank, n))
            own = xp.reshape(xp.copy(found[rank * n :]), (rank, m))
            total = total + xp.reshape(product(xp, p, own), (-1,))
        return Decoded(total, xp.all_finite(total))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (rows, columns) of a tensor as a matrix: its first dimension, for instance the output
    channels of a convolution, by all others."""
    return (shape[0] if shape else 1), math.prod(shape[1:])


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
    """Return orthonormal rows that span the same space, of a matrix or of each of a stack:
    Gram-Schmidt, row by row, each row twice, since once is not enough where rows are nearly alike.
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
    """Return the rows of ``new``, in the place of zeros those of ``old``, or they would stay zero
    for ever."""
    ones = xp.transpose(xp.full_like(new[:1], 1.0))
    alive = xp.cast(xp.matmul(xp.abs(new), ones) > 0, xp.dtype(new))
    return alive * new + (1 - alive) * old


def _by_qr(xp: Any, rows: Array) -> Array:
    return xp.transpose(xp.orthonormal_columns(xp.transpose(rows)))


def _random(x: Array, n: int, context: Context) -> Array:
    """``n`` normal numbers, the same on all ranks, others for every step and tensor."""
    xp = backend_of(x)
    dtype = xp.dtype(x)

    def draw(step: Any) -> list[np.ndarray]:
        random = shared_generator(context._replace(step=int(step)))
        return [random.standard_normal(n).astype(dtype)]

    return xp.on_host(draw, [context.step], [(dtype, n)], x)[0]
