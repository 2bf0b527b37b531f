"""Top-k of whole buckets: one pass over memory, one message and one addition for all tensors.

A chain of momentum correction, error feedback and an allgather of the largest elements does for a
bucket at once, in the loops of :mod:`hvd_compress.kernels`, what its blocks would do for one tensor
after the other, and gives the same bits; tests hold the two equal.  The message of a bucket is the
sparse frame of all its tensors end to end.

The new state is written to other arrays than the old one, which takes no more time than to write it
in place, and survives a step in which a NaN or Inf shows up on any rank.  The two take turns, so
that a step needs no fresh memory.  Users see both, and may give either other memory between two
steps: then there is fresh memory for the new state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Outcome, Sparse, State
from hvd_compress.chain import Repeated, Transform, in_range
from hvd_compress.codecs import logarithmic
from hvd_compress.errors import CompressionError
from hvd_compress.fused.messages import message_of
from hvd_compress.fused.on_host import Memory, exchange_on_host
from hvd_compress.kernels import Column, Steps, addresses, are_flat, loops_of, merge
from hvd_compress.operators import top_k
from hvd_compress.requests import Gather, Joint, Request
from hvd_compress.times import phase
from hvd_compress.transforms import momentum_correction
from hvd_compress.wire import sparse_size

_MOST_ELEMENTS = 2**32
_V, _R = "velocity", "residual"

#: the indices and values of a rank
Entries = tuple[np.ndarray, np.ndarray]


class Tensor(NamedTuple):
    """One tensor of a bucket in one step: the gradient as it was given, flat as ``x``, how many
    elements are selected, and the momentum, which may change from step to step and from tensor to
    tensor; the rest is as in :class:`hvd_compress.base.Context`, and the same for all tensors."""

    gradient: Array
    x: Array
    state: State
    k: int
    momentum: float
    scratch: dict[str, Any]
    in_place: bool
    sparse: bool


@dataclasses.dataclass(frozen=True, eq=False)
class FusedTopK:
    """The exchange of all tensors of a bucket; see :class:`hvd_compress.requests.Joint`.

    Attributes:
        before: transforms without a state that come first.
        select: says how many elements of a tensor are sent.
        correction: applies momentum; ``None`` without momentum correction.
        nesterov: the flag in use.
        values, indices: of the message.
        size: the number of ranks.
    """

    sends_all: ClassVar[bool] = False

    before: tuple[Transform, ...]
    select: top_k
    correction: momentum_correction | None
    nesterov: bool
    values: str | logarithmic
    indices: str
    size: int

    def request(self, gradient: Array, state: State, context: Context) -> Joint | None:
        """See :class:`hvd_compress.chain.Fused`: arrays are taken that are float32, or half
        precisions widened to it, that there are loops for, and of which a part is sent."""
        xp = backend_of(gradient)
        n = xp.size(gradient)
        if context.scratch is None or not 0 < n < _MOST_ELEMENTS:
            return None
        k = self.select.count(n, context)
        if k == n:
            return None
        if isinstance(self.values, str) and dense_is_less(n, k, self.values, self.size):
            return None
        x = xp.widen(gradient)
        for transform in self.before:
            x, _ = transform.update(x, {}, context)
        if (key := _key(gradient, x, context)) is None:
            return None
        momentum = self._momentum(context.momentum)
        tensor = Tensor(
            *(gradient, x, state, k, momentum),
            *(context.scratch, context.in_place, context.sparse),
        )
        return Joint(self, tensor, weight=k, key=key)

    def _momentum(self, given: float) -> float:
        """Return the momentum of a tensor, of whose optimizer it is ``given``."""
        own = None if self.correction is None else self.correction.momentum
        return given if own is None else own

    def __call__(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        xp, like = backend_of(tensors[0].x), tensors[0].x
        if xp.traces:
            return (yield from self._on_host(tensors))
        bucket = self._bucket(tensors)
        gradients = Column([t.x for t in tensors], bucket.sizes)
        steps = bucket.begin(gradients, [t.state for t in tensors])
        momenta = [t.momentum for t in tensors]
        indices, sent, theirs = yield from self._entries(bucket, steps, momenta)
        with phase("add_up"):
            if tensors[0].sparse:
                means, finite = self._sparse(bucket, like, theirs)
            else:
                means, finite = self._dense(bucket, tensors, theirs)
        places = xp.split(xp.from_numpy(indices - bucket.shifts, like), bucket.counts)
        own = map(Sparse, places, xp.split(xp.from_numpy(sent, like), bucket.counts))
        return list(map(Outcome, means, own, bucket.settle(finite)))

    def again(
        self, tensors: Repeated, key: Hashable, context: Context
    ) -> Generator[Request, Any, tuple[Sequence[Array | Sparse], list[State]]] | None:
        """See :class:`hvd_compress.chain.Fused`."""
        bucket = tensors.scratch.get("bucket")
        if self.before or bucket is None or bucket.form is not self or not bucket.is_of(tensors):
            return None
        return self._again(bucket, tensors, context.sparse)

    def _again(
        self, bucket: _Bucket, tensors: Repeated, sparse: bool
    ) -> Generator[Request, Any, tuple[Sequence[Array | Sparse], list[State]]]:
        directions = tensors.gradients
        steps = bucket.begin(Column(directions, bucket.sizes), tensors.states)
        momenta = [*map(self._momentum, tensors.momenta)]
        _, _, theirs = yield from self._entries(bucket, steps, momenta)
        with phase("add_up"):
            if sparse:
                directions, finite = self._sparse(bucket, directions[0], theirs)
            else:
                finite = bucket.add_up(directions, theirs, self.size)
        return directions, bucket.settle(finite)

    def _entries(
        self, bucket: _Bucket, steps: Steps, momenta: list[float]
    ) -> Generator[Request, Any, tuple[np.ndarray, np.ndarray, list[Entries]]]:
        """Send the largest elements; return the indices and values of those that this rank has
        sent, as the others see them, and the entries of all ranks."""
        xp, correction = backend_of(steps.gradients.arrays[0]), self.correction
        momentum = None if correction is None else momenta
        masking = correction is not None and correction.masking
        with phase("search"):
            indices, values, _ = bucket.selection.accumulate(steps, momentum, self.nesterov)
        with phase("encode"):
            frame, sent = bucket.message.encode(indices, values)
        with phase("search"), np.errstate(invalid="ignore"):  # of a non-finite step
            bucket.selection.settle(steps, indices, values - sent, masking)
        # In host memory, where it was made, and where the replies are read.
        frames = yield Gather(xp.from_numpy(frame, None), bucket.message.size is not None)
        with phase("add_up"):
            theirs = [
                bucket.message.decode(xp.to_numpy(frame), f"rank {rank}")
                for rank, frame in enumerate(frames)
            ]
        return indices, sent, theirs

    def _dense(
        self, bucket: _Bucket, tensors: list[Tensor], theirs: list[Entries]
    ) -> tuple[list[Array], np.ndarray]:
        """Return the mean of each tensor, and whether all ranks' values of it are finite."""
        xp = backend_of(tensors[0].x)
        means = [t.x if t.in_place else bucket.empty(t.x) for t in tensors]
        finite = bucket.add_up(means, theirs, self.size)
        for i, (tensor, mean) in enumerate(zip(tensors, means, strict=True)):
            in_gradient = xp.address(mean) == xp.address(tensor.gradient)
            means[i] = tensor.gradient if in_gradient else xp.restore(mean, tensor.gradient)
        narrow = [i for i, mean in enumerate(means) if xp.dtype(mean) != "float32"]
        # These may have no room for the mean of residuals.  Most often all have some.
        parts = [xp.reshape(means[i], (-1,)) for i in narrow]
        if parts and not xp.all_finite(xp.concat(parts)):
            for i, part in zip(narrow, parts, strict=True):
                finite[i] &= xp.all_finite(part)
        return means, finite

    def _sparse(
        self, bucket: _Bucket, like: Array, theirs: list[Entries]
    ) -> tuple[list[Sparse], np.ndarray]:
        """The same, with each mean as the elements that any rank has sent."""
        xp = backend_of(like)
        indices, values = zip(*theirs, strict=True)
        places, mean = merge(indices, values, self.size)
        cuts = np.searchsorted(places, [*bucket.starts, sum(bucket.sizes)])
        means, finite = [], np.isfinite(mean)
        for start, a, b in zip(bucket.starts, cuts, cuts[1:], strict=False):
            own = places[a:b] - start, mean[a:b]
            means.append(Sparse(*(xp.from_numpy(part, like) for part in own)))
        return means, np.logical_and.reduceat(finite, cuts[:-1])

    def _on_host(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        """The same of symbols."""
        size = backend_of(tensors[0].x).size
        starts = np.cumsum([0, *(size(t.x) for t in tensors)])
        counts, n = [t.k for t in tensors], int(starts[-1])
        shifts = np.repeat(starts[:-1], counts)

        message = message_of(self.values, self.indices, n, counts)

        def decode(frame: np.ndarray) -> list[np.ndarray]:
            indices, values = message.decode(frame, "this rank")
            return [indices - shifts, values]

        return (yield from exchange_on_host(self, tensors, message.size, decode, counts))

    def _bucket(self, tensors: list[Tensor]) -> _Bucket:
        """What is kept of a bucket between steps, in the first tensor's scratch."""
        size, scratch = backend_of(tensors[0].x).size, tensors[0].scratch
        sizes, counts = [size(t.x) for t in tensors], [t.k for t in tensors]
        bucket: _Bucket | None = scratch.get("bucket")
        device = _device(tensors[0].x)
        if (
            bucket is None
            or bucket.form is not self  # but that of what a switch began with
            or (bucket.sizes, bucket.counts, bucket.device) != (sizes, counts, device)
        ):
            keys = (_R,) if self.correction is None else (_R, _V)
            message = message_of(self.values, self.indices, sum(sizes), counts)
            like, memory = tensors[0].x, scratch.get("memory")
            bucket = _Bucket(self, sizes, counts, keys, message, like, memory=memory)
            scratch["bucket"] = bucket
        return bucket


class _Bucket:
    """What is kept of a bucket."""

    def __init__(
        self,
        form: FusedTopK,
        sizes: list[int],
        counts: list[int],
        keys: tuple[str, ...],
        message: Any,
        like: Array,
        *,
        memory: Memory | None,
    ) -> None:
        self.form, self.sizes, self.counts, self.message = form, sizes, counts, message
        self.device, self.loops = _device(like), loops_of(like)
        self.selection = self.loops.Selection(sizes, counts)
        self.starts = np.cumsum([0, *sizes[:-1]])
        #: what is taken off an index into all tensors, by entry
        self.shifts = np.repeat(self.starts, counts)
        self._keys, self._memory = keys, memory
        #: the states of the tensors, and where the next ones are written: the states before
        self._old: _States | None = None
        self._new: _States | None = None

    def is_of(self, tensors: Repeated) -> bool:
        """Return whether these may be the bucket's tensors, in arrays that loops take."""
        if self._memory is not None or self.counts != list(tensors.weights):
            return False
        columns = [[state.get(key) for state in tensors.states] for key in self._keys]
        return are_flat([tensors.gradients, *columns], self.sizes, self.device)

    def empty(self, like: Array) -> Array:
        """Return memory for a result."""
        n, xp = backend_of(like).size(like), backend_of(like)
        return xp.zeros(n, like) if self._memory is None else self._memory.take(n)

    def begin(self, gradients: Column, states: Sequence[Mapping[str, Array]]) -> Steps:
        """Return the step from these states, which most often are those that the last one
        returned."""
        old = _States.of(states, self._keys, self.sizes)
        is_known = self._old is not None and old.is_where(self._old)
        if not is_known or self._new is None or not self._new.is_there(self.sizes):
            fresh = [{key: self.empty(state[key]) for key in self._keys} for state in states]
            self._new = _States.of(fresh, self._keys, self.sizes)
        self._old = old
        new = self._new.columns
        return Steps(gradients, old.columns[_R], new[_R], old.columns.get(_V), new.get(_V))

    def add_up(self, out: Sequence[Array], theirs: list[Entries], size: int) -> np.ndarray:
        """Write the mean of all ranks' entries, and return of which tensors it is finite."""
        indices, values = zip(*theirs, strict=True)
        return self.loops.add_up(Column(out, self.sizes), indices, values, size)

    def settle(self, finite: np.ndarray) -> list[State]:
        """Return the states after the step, of which a tensor that is not finite has no part."""
        assert self._old is not None
        assert self._new is not None
        old, new = self._old, self._new
        self._old, self._new = new, old
        if not finite.all():
            kept = [
                its_new if fine else in_range(its_old)
                for its_old, its_new, fine in zip(old.states, new.states, finite, strict=True)
            ]
            self._old, self._new = _States.of(kept, self._keys, self.sizes), None
        states = [*map(dict, self._old.states)]
        if self._memory is not None:  # others may still look at the old state
            self._old = self._new = None
        return states


class _States(NamedTuple):
    """The states of the tensors of a bucket, and as columns by key."""

    states: list[State]
    columns: dict[str, Column]

    @classmethod
    def of(
        cls, states: Sequence[Mapping[str, Array]], keys: Sequence[str], sizes: list[int]
    ) -> _States:
        columns = {key: _column([state[key] for state in states], sizes) for key in keys}
        rows = zip(*(column.arrays for column in columns.values()), strict=True)
        return cls([dict(zip(keys, row, strict=True)) for row in rows], columns)

    def is_where(self, other: _States) -> bool:
        """Return whether these are the other's memory."""
        return all(
            np.array_equal(column.addresses, other.columns[key].addresses)
            for key, column in self.columns.items()
        )

    def is_there(self, sizes: list[int]) -> bool:
        """Return whether the memory is still where it was."""
        now = (addresses(column.arrays, sizes) for column in self.columns.values())
        return all(
            found is not None and np.array_equal(found, column.addresses)
            for found, column in zip(now, self.columns.values(), strict=True)
        )


def _column(arrays: Sequence[Array], sizes: list[int]) -> Column:
    try:
        return Column(arrays, sizes)
    except CompressionError:  # one may have been given memory with other strides
        return Column([backend_of(x).copy(x) for x in arrays], sizes)


def _key(gradient: Array, x: Array, context: Context) -> Hashable:
    """What tensors of a bucket have in common; ``None`` if one, which is flat ``x``, is in none."""
    xp = backend_of(x)
    if xp.dtype(x) != "float32" or loops_of(x) is None:
        return None
    if xp.dtype(gradient) != "float32" and (xp.traces or context.sparse):
        return None  # what comes back would be float32
    return xp.__name__, _device(x)


def _device(x: Array) -> Hashable:
    return getattr(x, "device", None)


def dense_is_less(n: int, k: int, values: str, size: int) -> bool:
    """Return whether a dense sum of ``n`` elements over ``size`` ranks moves fewer bytes than an
    allgather of ``k`` entries."""
    # A header and an entry more or less do not decide.
    entries = sparse_size(k, n, values) - sparse_size(1, n, values)
    return size * entries > 2 * 4 * n
