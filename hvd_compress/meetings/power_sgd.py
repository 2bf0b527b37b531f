"""Low rank: all ranks take one step of the power method on the average matrix, in two sums."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Decoded, Encoded, State
from hvd_compress.chain import Aggregated, Aggregation, Aggregator, Transform
from hvd_compress.codecs.at_random import shared_generator
from hvd_compress.config import checked, choice, numbers
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.fused import FusedLowRank
from hvd_compress.kernels.low_rank import matrix_shape
from hvd_compress.meetings.averaging import whole
from hvd_compress.meetings.factors import (
    left,
    of_unit_length,
    orthonormal_rows,
    product,
    right,
    rows_by_qr,
    without_zeros,
)
from hvd_compress.requests import Batch, Request, Sum

#: matrices of so many elements gain more from being multiplied together than copying them costs
_SMALL = 1 << 14


@dataclasses.dataclass(frozen=True)
class power_sgd(Aggregator, Coding, name="power_sgd"):
    """For a matrix M of n rows (the first dimension) and m columns (all others), on each rank::

        P = M Q           summed over the ranks, orthonormalised
        Q = M^T P         summed over the ranks
        average of the M  ~  P Q^T / N

    A message that stands alone is P and M^T P; receivers compute P P^T M from it.  Zero columns
    keep their old direction, or they would stay zero for ever.

    Options:
        rank, warm_start, alternate, orthogonalise: as of :class:`~hvd_compress.PowerSGD`.  Without
            a warm start Q is drawn from (seed, step, tensor).

    State: with ``warm_start`` ``factor`` Q^T, and ``other_factor`` P^T with ``alternate``; equal on
    all ranks.

    Reference: Vogels, Karimireddy, Jaggi, NeurIPS 2019; for the alternation arXiv 2008.01425.

    >>> matrix = np.outer([1.0, 2.0], [3.0, 4.0, 5.0])
    >>> world = World(chain(via=power_sgd(rank=1)), size=2)
    >>> world.exchange([matrix, 3 * matrix])[0].mean.round(6)
    array([[ 6.,  8., 10.],
           [12., 16., 20.]])
    """

    rank: int = checked(numbers("a number of columns, 1 or more", lambda n: n >= 1, whole=True), 1)
    warm_start: bool = choice(True, False)
    alternate: bool = choice(True, False, default=False)
    orthogonalise: str = choice("gram_schmidt", "qr")

    per_rank = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alternate and not self.warm_start:
            raise ConfigError("alternate=True goes on from the step before: warm_start=True")

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        if not self.warm_start:
            return ()
        return ("factor", "other_factor") if self.alternate else ("factor",)

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        xp = backend_of(x)
        n, m = matrix_shape(shape)
        rank = min(n, m, self.rank)
        # The same on all ranks, and for all tensors of a shape.
        random = np.random.default_rng(0)
        state = {}
        for key, columns in zip(self.keys, (m, n), strict=False):
            factor = random.standard_normal(rank * columns).astype(np.float32)
            state[key] = xp.cast(xp.from_numpy(factor, x), xp.dtype(x))
        return state

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        xp = backend_of(x)
        n, m = matrix_shape(context.shape)
        if n * m == 0:
            total = yield Sum(x)
            return Aggregated(total, x, True, state)
        # Products of matrices depend in their last bits on where in memory these begin; fresh ones
        # begin alike on all ranks.
        matrix = xp.reshape(xp.copy(x), (n, m))
        if self.alternate:
            return (yield from self._one_side(xp, matrix, state, context))
        old = self._first(x, state, context)
        rank = xp.shape(old)[0]
        # Its scale means nothing to the result, and could take the product out of range.
        q = of_unit_length(xp, old)
        rows = yield from _product(n * m, left, q, matrix)
        total = yield Sum(xp.reshape(rows, (-1,)))
        p = yield Batch(
            self._orthonormal, (xp.reshape(xp.divided(total, context.size), (rank, n)),)
        )
        own = yield from _product(n * m, right, p, matrix)
        total = yield Sum(xp.reshape(own, (-1,)))
        new = xp.reshape(xp.divided(total, context.size), (rank, m))
        mean = yield from _product(n * m, product, p, new)
        sent = yield from _product(n * m, product, p, own)
        mean, sent = xp.reshape(mean, (-1,)), xp.reshape(sent, (-1,))
        return Aggregated(mean, sent, xp.all_finite(mean), self._next(new, old, state))

    def fused(self, transforms: Sequence[Transform], context: Context) -> FusedLowRank | None:
        if self.alternate or not self.warm_start or self.orthogonalise != "gram_schmidt":
            return None
        return FusedLowRank.of(transforms, self.rank)

    def coding(self, n: int, context: Context) -> power_sgd:
        self._check_coding()
        return self

    def _check_coding(self) -> None:
        if self.alternate:
            raise UnsupportedError("with alternate=True a receiver would need the sender's state")

    def varies(self, n: int, context: Context) -> bool:
        return False

    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        self._check_coding()
        xp = backend_of(x)
        shape = matrix_shape(context.shape)
        if not math.prod(shape):
            return whole().encode(x, state, context)
        # Products of matrices depend in their last bits on where in memory these begin.
        matrix, old = xp.reshape(xp.copy(x), shape), self._first(x, state, context)
        p = self._orthonormal(xp, left(xp, of_unit_length(xp, old), matrix))
        own = right(xp, p, matrix)
        both = xp.concat([xp.reshape(p, (-1,)), xp.reshape(own, (-1,))])
        message, _, _ = whole().encode(both, {}, context)
        sent = xp.reshape(product(xp, p, own), (-1,))
        return Encoded(message, sent, self._next(own, old, state))

    def decode(
        self,
        messages: Sequence[Array],
        like: Array,
        context: Context,
        ranks: Sequence[int] | None = None,
    ) -> Decoded:
        self._check_coding()
        xp = backend_of(like)
        n, m = matrix_shape(context.shape)
        if n * m == 0:
            return whole().decode(messages, like, context, ranks)
        rank = min(n, m, self.rank)
        both, total = xp.zeros(rank * (n + m), like), xp.zeros(n * m, like)
        for sender, message in zip(ranks or range(len(messages)), messages, strict=True):
            found = whole().decode([message], both, context, [sender]).total
            p = xp.reshape(xp.copy(found[: rank * n]), (rank, n))
            own = xp.reshape(xp.copy(found[rank * n :]), (rank, m))
            total = total + xp.reshape(product(xp, p, own), (-1,))
        return Decoded(total, xp.all_finite(total))

    def _first(self, x: Array, state: State, context: Context) -> Array:
        """Q^T as it is before the step, not yet of unit length."""
        xp, (n, m) = backend_of(x), matrix_shape(context.shape)
        rank = min(n, m, self.rank)
        factor = state["factor"] if self.warm_start else _random(x, rank * m, context)
        return xp.reshape(factor, (rank, m))

    def _next(self, new: Array, old: Array, state: State) -> State:
        """The state for the next step, given M^T P and Q, transposed."""
        xp = backend_of(new)
        if not self.warm_start:
            return state
        return {"factor": xp.reshape(without_zeros(xp, new, old), (-1,))}

    def _one_side(self, xp: Any, matrix: Array, state: State, context: Context) -> Aggregation:
        n, m = xp.shape(matrix)
        q, p = xp.reshape(state["factor"], (-1, m)), xp.reshape(state["other_factor"], (-1, n))
        rank = xp.shape(q)[0]
        is_even = context.step % 2 == 0

        def side(of_q: Any, of_p: Any) -> Any:
            return xp.choose(is_even, of_q, of_p)

        # Where the step is a symbol, the shape of what is sent must not depend on it.
        width = max(n, m) if xp.traces else None

        def on_wire(rows: Array) -> Array:
            missing = 0 if width is None else rank * (width - xp.shape(rows)[1])
            flat = xp.reshape(rows, (-1,))
            return xp.concat([flat, xp.zeros(missing, flat)]) if missing else flat

        def even() -> Array:
            return on_wire(xp.matmul(self._orthonormal(xp, p), matrix))

        def odd() -> Array:
            return on_wire(xp.matmul(self._orthonormal(xp, q), xp.transpose(matrix)))

        own = side(even, odd)
        total = yield Sum(own)
        average = xp.divided(total, context.size)

        def product_of(flat: Array) -> Array:
            def left() -> Array:
                new = xp.reshape(flat[: rank * m], (rank, m))
                return xp.matmul(xp.transpose(self._orthonormal(xp, p)), new)

            def right() -> Array:
                new = xp.reshape(flat[: rank * n], (rank, n))
                return xp.matmul(xp.transpose(new), self._orthonormal(xp, q))

            return xp.reshape(side(left, right), (-1,))

        mean = product_of(average)
        new_q = side(
            lambda: without_zeros(xp, xp.reshape(average[: rank * m], (rank, m)), q), lambda: q
        )
        new_p = side(
            lambda: p, lambda: without_zeros(xp, xp.reshape(average[: rank * n], (rank, n)), p)
        )
        factors = {
            "factor": xp.reshape(new_q, (-1,)),
            "other_factor": xp.reshape(new_p, (-1,)),
        }
        return Aggregated(mean, product_of(own), xp.all_finite(mean), factors)

    @property
    def _orthonormal(self) -> Callable[[Any, Array], Array]:
        return rows_by_qr if self.orthogonalise == "qr" else orthonormal_rows


def _product(
    size: int, function: Callable[[Any, Array, Array], Array], x: Array, y: Array
) -> Generator[Request, Any, Array]:
    """The product with a matrix of ``size`` elements: those of small ones are made together."""
    if size > _SMALL:
        return function(backend_of(x), x, y)
    return (yield Batch(function, (x, y)))


def _random(x: Array, n: int, context: Context) -> Array:
    """``n`` normal numbers, the same on all ranks, others for every step and tensor."""
    xp = backend_of(x)
    dtype = xp.dtype(x)

    def draw(step: Any) -> list[np.ndarray]:
        random = shared_generator(context._replace(step=int(step)))
        return [random.standard_normal(n).astype(dtype)]

    return xp.on_host(draw, [context.step], [(dtype, n)], x)[0]
