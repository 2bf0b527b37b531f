"""Low rank of whole buckets: three passes over memory, and no fresh memory.

A chain of error feedback and factors does for a bucket at once what its blocks do for one tensor
after the other, and gives the same bits; tests hold the two equal.  The factors of all matrices are
end to end in two sums.

What is compressed, gradient + residual, is written where the mean will be.  States are written in
place in the last pass, when it is known that the mean is finite, so they need no second copy; and a
step with a NaN or Inf on any rank leaves them as they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Context
from hvd_compress.chain import Transform
from hvd_compress.fused.bucket import Arrays, Bucket, InPlace, Tensor
from hvd_compress.kernels import Column
from hvd_compress.kernels.low_rank import Matrices, matrix_shape
from hvd_compress.requests import Request, Sum
from hvd_compress.times import phase
from hvd_compress.transforms import error_feedback

_R, _Q = "residual", "factor"
#: products that are smaller are in range, and so are their sums
_LARGE = 1e38


@dataclasses.dataclass(frozen=True, eq=False)
class FusedLowRank(InPlace):
    """The exchange of all tensors of a bucket; see :class:`hvd_compress.fused.bucket.InPlace`.

    Attributes:
        rank: columns of the factors, unless a matrix has fewer.
        feeds_back: whether there is error feedback.
    """

    rank: int
    feeds_back: bool

    @classmethod
    def of(cls, transforms: Sequence[Transform], rank: int) -> FusedLowRank | None:
        """Return the form of ``transforms`` and an exchange of two factors, if there is one."""
        if any(type(t) is not error_feedback or t.units != "gradient" for t in transforms):
            return None
        return cls((), rank, bool(transforms))

    def weight(self, context: Context) -> int:
        n, m = matrix_shape(context.shape)
        return min(n, m, self.rank) * (n + m)

    def made(self, tensors: list[Tensor]) -> _Bucket:
        return _Bucket(self, tensors)


class _Bucket(Bucket):
    form: FusedLowRank

    def __init__(self, form: FusedLowRank, tensors: list[Tensor]) -> None:
        super().__init__(form, tensors)
        self.keys = (_Q, _R) if form.feeds_back else (_Q,)
        shapes = [matrix_shape(shape) for shape in self.shapes]
        ranks = [min(*shape, form.rank) for shape in shapes]
        pairs = list(zip(shapes, ranks, strict=True))
        #: of the factors that are kept
        self._widths = [m * rank for (_, m), rank in pairs]
        self._matrix_shapes, self._ranks = shapes, np.array(ranks)
        self._matrices = Matrices(shapes, ranks)
        self._starts_of_p = np.cumsum([0, *(n * rank for (n, _), rank in pairs[:-1])])
        self._starts_of_q = np.cumsum([0, *self._widths[:-1]])
        #: columns of the rows of all Q^T, and where they start
        self._lengths = np.repeat([m for _, m in shapes], ranks)
        self._rows_of_q = np.cumsum([0, *self._lengths[:-1]])
        self._rows, self._p = np.empty((2, self._matrices.of_p), np.float32)
        self._q, self._own, self._new = np.empty((3, self._matrices.of_q), np.float32)
        self.requests = [Sum(self._rows), Sum(self._own)]

    def sizes_of(self, key: str) -> list[int]:
        return self._widths if key == _Q else self.sizes

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, np.ndarray]:
        like = arrays.gradients[0]
        xp = backend_of(like)
        with phase("encode"):
            rows = self.left(arrays)
        total = yield Sum(xp.from_numpy(rows, like), owned=True)
        with phase("encode"):
            own = self.right(arrays, xp.to_numpy(total))
        total = yield Sum(xp.from_numpy(own, like))
        with phase("add_up"):
            return self.settle(arrays, xp.to_numpy(total))

    def left(self, arrays: Arrays) -> np.ndarray:
        """Return what is sent first: all P, transposed."""
        x, out, factors, *residuals = arrays.columns()
        np.concatenate(factors.on_host().arrays, out=self._new)
        # Its scale means nothing to the result, and could take the product out of range.
        self._matrices.unit(self._new, self._q)
        added = (*residuals, out) if residuals else ()
        self._matrices.left(x, self._q, self._rows, *added)
        return self._rows

    def right(self, arrays: Arrays, total: np.ndarray) -> np.ndarray:
        """Return what is sent then, given the sum of all ranks' P: all Q, transposed."""
        x, out, _, *residuals = arrays.columns()
        np.divide(total, np.float32(self.size), out=self._p)
        self._matrices.orthonormal(self._p)
        self._matrices.right(out if residuals else x, self._p, self._own)
        return self._own

    def settle(self, arrays: Arrays, total: np.ndarray) -> np.ndarray:
        """Write means and states, given the sum of all ranks' Q; return of which tensors the mean
        is finite."""
        _, out, factors, *residuals = arrays.columns()
        factors, left = factors.on_host(), residuals[0] if residuals else None
        np.divide(total, np.float32(self.size), out=self._new)
        sent = None if arrays.sent is None else Column(arrays.sent, self.sizes)
        finite = self._finite()
        self._matrices.settle(
            *(out, left, self._p, self._new, self._own), out=out, sent=sent, finite=finite
        )
        old = np.concatenate(factors.arrays)
        alive = np.add.reduceat(np.abs(self._new), self._rows_of_q) > 0
        alive = np.repeat(alive.astype(np.float32), self._lengths)
        with np.errstate(invalid="ignore"):
            new = alive * self._new + (1 - alive) * old  # a zero would stay zero for ever
        cuts = np.split(new, self._starts_of_q[1:])
        for factor, its_new, fine in zip(factors.arrays, cuts, finite, strict=True):
            if fine:
                factor[:] = its_new
        return finite

    def _finite(self) -> np.ndarray:
        """Return of which tensors the mean is finite."""
        p = np.maximum.reduceat(np.abs(self._p), self._starts_of_p).astype(np.float64)
        q = np.maximum.reduceat(np.abs(self._new), self._starts_of_q).astype(np.float64)
        finite = p * q * self._ranks < _LARGE
        for i in np.flatnonzero(~finite & np.isfinite(p) & np.isfinite(q)):
            finite[i] = self._is_product_finite(i)
        return finite

    def _is_product_finite(self, i: Any) -> bool:
        one, rank = Matrices([self._matrix_shapes[i]], [self._ranks[i]]), self._ranks[i]
        p, q = self._starts_of_p[i], self._starts_of_q[i]
        mean = np.empty(self.sizes[i], np.float32)
        own = self._p[p : p + rank * self._matrix_shapes[i][0]], self._new[q : q + self._widths[i]]
        one.product(*own, Column([mean]))
        return bool(np.isfinite(mean).all())
