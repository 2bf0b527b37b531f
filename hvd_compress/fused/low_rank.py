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
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Outcome, Sparse, State
from hvd_compress.chain import Repeated, Transform, in_range
from hvd_compress.coding.factors import factors, matrix_shape
from hvd_compress.errors import CompressionError
from hvd_compress.fused.coded import stand_ins
from hvd_compress.kernels import Column, are_flat
from hvd_compress.kernels.low_rank import Matrices
from hvd_compress.requests import Joint, Request, Sum
from hvd_compress.schedules import Start, started
from hvd_compress.times import phase
from hvd_compress.transforms import error_feedback

_R, _Q = "residual", "factor"
#: products that are smaller are in range, and so are their sums
_LARGE = 1e38


class Tensor(NamedTuple):
    """One tensor of a bucket in one step: the gradient as it was given, flat as ``x``; whether the
    result may be written there; its shape as a matrix, the rank, the scratch, and whether somebody
    looks at what was sent."""

    gradient: Array
    x: Array
    state: State
    in_place: bool
    shape: tuple[int, int]
    rank: int
    scratch: dict[str, Any]
    needs_sent: bool


@dataclasses.dataclass(frozen=True, eq=False)
class FusedLowRank:
    """The exchange of all tensors of a bucket; see :class:`hvd_compress.requests.Joint`.

    Attributes:
        block: says what is sent of each.
        feeds_back: whether there is error feedback.
        size: the number of ranks.
        start: until then tensors are exchanged in another way.
    """

    sends_all: ClassVar[bool] = True

    block: factors
    feeds_back: bool
    size: int
    start: Start = True

    @classmethod
    def of(cls, transforms: Sequence[Transform], block: factors, size: int) -> FusedLowRank | None:
        """Return the form of ``transforms`` and an exchange of two factors, if there is one."""
        feeds_back = bool(transforms)
        if any(type(t) is not error_feedback or t.units != "gradient" for t in transforms):
            return None
        if not block.warm_start or block.orthogonalise != "gram_schmidt":
            return None
        return cls(block, feeds_back, size)

    def beginning(self, start: Start) -> FusedLowRank:
        """Return a form that takes tensors from ``start`` on only."""
        return dataclasses.replace(self, start=start)

    def request(self, gradient: Array, state: State, context: Context) -> Joint | None:
        """See :class:`hvd_compress.chain.Fused`: float32 in host memory is taken."""
        xp = backend_of(gradient)
        if context.scratch is None or context.sparse or not xp.size(gradient):
            return None
        if xp.traces or xp.dtype(gradient) != "float32":
            return None
        if not started(self.start, context.step, context.epoch):
            return None
        x = xp.widen(gradient)
        if xp.loops(x) != "hvd_compress.kernels":
            return None
        shape = xp.shape(gradient)
        rank, (n, m) = self.block.rank_of(shape), matrix_shape(shape)
        tensor = Tensor(
            *(gradient, x, state, context.in_place, (n, m), rank),
            *(context.scratch, context.needs_sent),
        )
        return Joint(self, tensor, weight=rank * (n + m), key=xp.__name__)

    def __call__(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        bucket, xp = self._bucket(tensors), backend_of(tensors[0].x)
        states = [{key: _flat(t.state[key]) for key in bucket.keys} for t in tensors]
        out = [t.x if t.in_place else xp.zeros(xp.size(t.x), t.x) for t in tensors]
        is_needed = tensors[0].needs_sent
        sent = [np.empty(n, np.float32) for n in bucket.sizes] if is_needed else None
        arrays = _Arrays(bucket, [t.x for t in tensors], states, out)
        finite = yield from self._meet(bucket, arrays, sent)
        means = []
        for tensor, mean in zip(tensors, out, strict=True):
            in_gradient = xp.address(mean) == xp.address(tensor.gradient)
            means.append(tensor.gradient if in_gradient else xp.restore(mean, tensor.gradient))
        own = stand_ins(bucket.sizes)
        if sent is not None:
            own = [xp.from_numpy(x, t.x) for x, t in zip(sent, tensors, strict=True)]
        return list(map(Outcome, means, own, _settled(states, finite)))

    def again(
        self, tensors: Repeated, key: Hashable, context: Context
    ) -> Generator[Request, Any, tuple[Sequence[Array | Sparse], list[State]]] | None:
        """See :class:`hvd_compress.chain.Fused`."""
        bucket = tensors.scratch.get("bucket")
        if context.sparse or bucket is None or bucket.form is not self or not bucket.is_of(tensors):
            return None
        return self._again(bucket, tensors)

    def _again(
        self, bucket: _Bucket, tensors: Repeated
    ) -> Generator[Request, Any, tuple[Sequence[Array], list[State]]]:
        states = [{key: state[key] for key in bucket.keys} for state in tensors.states]
        arrays = _Arrays(bucket, tensors.gradients, states, tensors.gradients)
        finite = yield from self._meet(bucket, arrays, None)
        return tensors.gradients, _settled(states, finite)

    def _meet(
        self, bucket: _Bucket, arrays: _Arrays, sent: Sequence[np.ndarray] | None
    ) -> Generator[Request, Any, np.ndarray]:
        """Write means, states, and what was sent, if that is asked for; return of which tensors
        the mean is finite (bool)."""
        xp, like = backend_of(arrays.gradients[0]), arrays.gradients[0]
        with phase("encode"):
            rows = bucket.left(arrays)
        total = yield Sum(xp.from_numpy(rows, like), owned=True)
        with phase("encode"):
            own = bucket.right(arrays, xp.to_numpy(total))
        total = yield Sum(xp.from_numpy(own, like))
        with phase("add_up"):
            return bucket.settle(arrays, xp.to_numpy(total), sent)

    def _bucket(self, tensors: list[Tensor]) -> _Bucket:
        """What is kept of a bucket between steps, in the first tensor's scratch."""
        scratch, shapes = tensors[0].scratch, [t.shape for t in tensors]
        bucket: _Bucket | None = scratch.get("bucket")
        # That of what a switch began with is of another form.
        if bucket is None or bucket.form is not self or bucket.shapes != shapes:
            bucket = scratch["bucket"] = _Bucket(self, shapes, [t.rank for t in tensors])
        return bucket


class _Arrays:
    """The arrays of a bucket in one step: gradients, states, and where the means are written."""

    def __init__(
        self,
        bucket: _Bucket,
        gradients: Sequence[Array],
        states: Sequence[Mapping[str, Array]],
        out: Sequence[Array],
    ) -> None:
        self.gradients, self._sizes = gradients, bucket.sizes
        self._columns = [gradients, out]
        if _R in bucket.keys:
            self._columns.append([state[_R] for state in states])
        self._factors, self._widths = [state[_Q] for state in states], bucket.widths
        self._places = [column.addresses for column in self._now()]

    def _now(self) -> list[Column]:
        """Gradients, where the means are written, factors, and residuals if there are any."""
        large = [Column(own, self._sizes) for own in self._columns]
        return [*large[:2], Column(self._factors, self._widths), *large[2:]]

    def columns(self) -> tuple[Column, Column, Column, Column | None]:
        """Return the same, in every turn of this rank anew: an array is not its memory.

        Raises:
            CompressionError: an array has other memory than when the step began.
        """
        columns = self._now()
        for column, place in zip(columns, self._places, strict=True):
            if not np.array_equal(column.addresses, place):
                raise CompressionError(
                    "the memory of a tensor was changed while it was being exchanged: change .data "
                    "of gradients and states between optimizer.step() and loss.backward() only"
                )
        x, out, factors, *residuals = columns
        return x, out, factors.on_host(), residuals[0] if residuals else None


class _Bucket:
    """What is kept of a bucket."""

    def __init__(self, form: FusedLowRank, shapes: list[tuple[int, int]], ranks: list[int]) -> None:
        self.form, self.shapes = form, shapes
        self.keys = (_R, _Q) if form.feeds_back else (_Q,)
        self.sizes = [n * m for n, m in shapes]
        #: of the factors that are kept
        self.widths = [m * rank for (_, m), rank in zip(shapes, ranks, strict=True)]
        pairs = list(zip(shapes, ranks, strict=True))
        self._weights = [rank * (n + m) for (n, m), rank in pairs]
        self._ranks, self._matrices = np.array(ranks), Matrices(shapes, ranks)
        self._starts_of_p = np.cumsum([0, *(n * rank for (n, _), rank in pairs[:-1])])
        self._starts_of_q = np.cumsum([0, *self.widths[:-1]])
        #: columns of the rows of all Q^T, and where they start
        self._lengths = np.repeat([m for _, m in shapes], ranks)
        self._rows_of_q = np.cumsum([0, *self._lengths[:-1]])
        self._rows, self._p = np.empty((2, self._matrices.of_p), np.float32)
        self._q, self._own, self._new = np.empty((3, self._matrices.of_q), np.float32)

    def is_of(self, tensors: Repeated) -> bool:
        """Return whether these may be the bucket's tensors, in arrays that can be written to."""
        if self._weights != list(tensors.weights):
            return False
        device = getattr(tensors.gradients[0], "device", None)
        by_key = {key: [state.get(key) for state in tensors.states] for key in self.keys}
        large = [tensors.gradients, *([by_key[_R]] if _R in by_key else [])]
        return are_flat(large, self.sizes, device) and are_flat([by_key[_Q]], self.widths, device)

    def left(self, arrays: _Arrays) -> np.ndarray:
        """Return what is sent first: all P, transposed."""
        x, out, factors, residuals = arrays.columns()
        np.concatenate(factors.arrays, out=self._new)
        # Its scale means nothing to the result, and could take the product out of range.
        self._matrices.unit(self._new, self._q)
        added = () if residuals is None else (residuals, out)
        self._matrices.left(x, self._q, self._rows, *added)
        return self._rows

    def right(self, arrays: _Arrays, total: np.ndarray) -> np.ndarray:
        """Return what is sent then, given the sum of all ranks' P: all Q, transposed."""
        x, out, _, residuals = arrays.columns()
        np.divide(total, np.float32(self.form.size), out=self._p)
        self._matrices.orthonormal(self._p)
        self._matrices.right(x if residuals is None else out, self._p, self._own)
        return self._own

    def settle(
        self, arrays: _Arrays, total: np.ndarray, sent: Sequence[np.ndarray] | None
    ) -> np.ndarray:
        """Write means and states, given the sum of all ranks' Q; return of which tensors the mean
        is finite."""
        _, out, factors, residuals = arrays.columns()
        np.divide(total, np.float32(self.form.size), out=self._new)
        finite = self._finite()
        self._matrices.settle(
            *(out, residuals, self._p, self._new, self._own, out),
            *(None if sent is None else Column(sent, self.sizes), finite),
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
        one, rank = Matrices([self.shapes[i]], [self._ranks[i]]), self._ranks[i]
        p, q = self._starts_of_p[i], self._starts_of_q[i]
        mean = np.empty(self.sizes[i], np.float32)
        own = self._p[p : p + rank * self.shapes[i][0]], self._new[q : q + self.widths[i]]
        one.product(*own, Column([mean]))
        return bool(np.isfinite(mean).all())


def _flat(x: Array) -> Array:
    """Return ``x``, or what takes its place if it was given memory with other strides."""
    xp = backend_of(x)
    return xp.copy(x) if xp.address(x) is None else x


def _settled(states: Sequence[State], finite: Sequence[bool] | np.ndarray) -> list[State]:
    """Return the states after the step, which were written in place where it was finite."""
    pairs = zip(states, finite, strict=True)
    return [dict(state) if fine else in_range(state) for state, fine in pairs]
