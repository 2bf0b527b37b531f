"""Top-k of whole buckets: one pass over memory, one message and one addition for all tensors.

A chain of momentum correction, error feedback and an allgather of the largest elements does for a
bucket at once, in the loops of :mod:`hvd_compress.kernels`, what its blocks would do for one tensor
after the other, and gives the same bits; tests hold the two equal.  The message of a bucket is the
sparse frame of all its tensors end to end.

The new state is written to other arrays than the old one, which takes no more time than to write it
in place, and survives a step in which a NaN or Inf shows up on any rank.  The two take turns, so
that a step needs no fresh memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Gather, Joint, Outcome, Request, Sparse, State
from hvd_compress.chain import Repeated, Transform, in_range
from hvd_compress.codecs import logarithmic
from hvd_compress.fused.messages import message_of
from hvd_compress.fused.on_host import Memory, exchange_on_host
from hvd_compress.kernels import Step, loops_of, merge
from hvd_compress.operators import top_k
from hvd_compress.times import phase
from hvd_compress.wire import sparse_size

_MOST_ELEMENTS = 2**32
_V, _R = "velocity", "residual"

#: the indices and values of a rank
Entries = tuple[np.ndarray, np.ndarray]


class Tensor(NamedTuple):
    """One tensor of a bucket in one step: the gradient as it was given, flat as ``x``, and how many
    elements are selected; the rest is as in :class:`hvd_compress.base.Context`, and the same for
    all tensors."""

    gradient: Array
    x: Array
    state: State
    k: int
    scratch: dict[str, Any]
    in_place: bool
    sparse: bool


@dataclasses.dataclass(frozen=True, eq=False)
class FusedTopK:
    """The exchange of all tensors of a bucket; see :class:`hvd_compress.base.Joint`.

    Attributes:
        before: transforms without a state that come first.
        select: says how many elements of a tensor are sent.
        momentum: ``None`` without momentum correction.
        nesterov, masking: its options.
        values, indices: of the message.
        size: the number of ranks.
    """

    before: tuple[Transform, ...]
    select: top_k
    momentum: float | None
    nesterov: bool
    masking: bool
    values: str | logarithmic
    indices: str
    size: int

    def request(self, gradient: Array, state: State, context: Context) -> Joint | None:
        """See :class:`hvd_compress.chain.Fused`: float32 arrays that there are loops for are taken,
        of which a part is sent."""
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
        if (key := _key(gradient, x)) is None:
            return None
        tensor = Tensor(gradient, x, state, k, context.scratch, context.in_place, context.sparse)
        return Joint(self, tensor, weight=k, key=key)

    def again(
        self, tensors: Iterable[Repeated], key: Hashable, context: Context
    ) -> list[Tensor] | None:
        """See :class:`hvd_compress.chain.Fused`."""
        if self.before:
            return None
        keys, found = (_R,) if self.momentum is None else (_R, _V), []
        in_place, sparse = context.in_place, context.sparse
        for gradient, state, k, scratch in tensors:
            x = backend_of(gradient).widen(gradient)
            if _key(gradient, x) != key:
                return None
            own = {key: state[key] for key in keys}
            found.append(Tensor(gradient, x, own, k, scratch, in_place, sparse))
        return found

    def __call__(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        xp = backend_of(tensors[0].x)
        if xp.traces:
            return (yield from self._on_host(tensors))
        bucket = self._bucket(tensors)
        steps = bucket.steps(tensors)
        with phase("search"):
            indices, values, _ = bucket.selection.accumulate(steps, self.momentum, self.nesterov)
        with phase("encode"):
            frame, sent = bucket.message.encode(indices, values)
        with phase("search"), np.errstate(invalid="ignore"):  # of a non-finite step
            bucket.selection.settle(steps, indices, values - sent, self.masking)
        # In host memory, where it was made, and where the replies are read.
        frames = yield Gather(xp.from_numpy(frame, None), bucket.message.size is not None)

        with phase("add_up"):
            theirs = [
                bucket.message.decode(xp.to_numpy(frame), f"rank {rank}")
                for rank, frame in enumerate(frames)
            ]
            add_up = self._sparse if tensors[0].sparse else self._dense
            means, finite = add_up(bucket, tensors, theirs)
        counts, like = bucket.form[1], tensors[0].x
        places = xp.split(xp.from_numpy(indices - bucket.shifts, like), counts)
        mine = map(Sparse, places, xp.split(xp.from_numpy(sent, like), counts))
        outcomes = []
        for i, (mean, own, fine) in enumerate(zip(means, mine, finite.tolist(), strict=True)):
            old = tensors[i].state
            outcomes.append(Outcome(mean, own, bucket.swap(i, old) if fine else in_range(old)))
        return outcomes

    def _dense(
        self, bucket: _Bucket, tensors: list[Tensor], theirs: list[Entries]
    ) -> tuple[list[Array], np.ndarray]:
        """Return the mean of each tensor, and whether all ranks' values of it are finite."""
        xp = backend_of(tensors[0].x)
        means = [t.x if t.in_place else bucket.empty(t.x) for t in tensors]
        indices, values = zip(*theirs, strict=True)
        finite = loops_of(tensors[0].x).add_up(means, indices, values, self.size)
        for i, (tensor, mean) in enumerate(zip(tensors, means, strict=True)):
            in_gradient = xp.address(mean) == xp.address(tensor.gradient)
            means[i] = tensor.gradient if in_gradient else xp.restore(mean, tensor.gradient)
        return means, finite

    def _sparse(
        self, bucket: _Bucket, tensors: list[Tensor], theirs: list[Entries]
    ) -> tuple[list[Sparse], np.ndarray]:
        """The same, with each mean as the elements that any rank has sent."""
        xp = backend_of(tensors[0].x)
        indices, values = zip(*theirs, strict=True)
        places, mean = merge(indices, values, self.size)
        cuts = np.searchsorted(places, [*bucket.starts, sum(bucket.sizes)])
        means, finite = [], np.isfinite(mean)
        for start, a, b in zip(bucket.starts, cuts, cuts[1:], strict=False):
            own = places[a:b] - start, mean[a:b]
            means.append(Sparse(*(xp.from_numpy(part, tensors[0].x) for part in own)))
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
        size = backend_of(tensors[0].x).size
        sizes, counts = [size(t.x) for t in tensors], [t.k for t in tensors]
        bucket = tensors[0].scratch.get("bucket")
        form = sizes, counts, _device(tensors[0].x)
        if bucket is None or bucket.form != form:
            bucket = _Bucket(sizes, counts, tensors, self.values, self.indices)
            tensors[0].scratch["bucket"] = bucket
        return bucket


class _Bucket:
    def __init__(
        self,
        sizes: list[int],
        counts: list[int],
        tensors: list[Tensor],
        values: str | logarithmic,
        indices: str,
    ) -> None:
        self.sizes, self.form = sizes, (sizes, counts, _device(tensors[0].x))
        self.message = message_of(values, indices, sum(sizes), counts)
        self.selection = loops_of(tensors[0].x).Selection(sizes, counts)
        self.starts = np.cumsum([0, *sizes[:-1]])
        #: what is taken off an index into all tensors, by entry
        self.shifts = np.repeat(self.starts, counts)
        self._memory: Memory | None = tensors[0].scratch.get("memory")
        if self._memory is None:
            self._spare = self._fresh(tensors)

    def empty(self, like: Array) -> Array:
        """Return memory for a result."""
        n, xp = backend_of(like).size(like), backend_of(like)
        return xp.zeros(n, like) if self._memory is None else self._memory.take(n)

    def _fresh(self, tensors: list[Tensor]) -> list[State]:
        return [{key: self.empty(x) for key, x in t.state.items()} for t in tensors]

    def steps(self, tensors: list[Tensor]) -> list[Step]:
        if self._memory is not None:  # others may still look at the old state
            self._spare = self._fresh(tensors)
        return [
            Step(t.x, t.state[_R], new[_R], t.state.get(_V), new.get(_V))
            for t, new in zip(tensors, self._spare, strict=True)
        ]

    def swap(self, i: int, old: State) -> State:
        """Return the new state of tensor ``i``; the old one's memory is that of the next."""
        new, self._spare[i] = self._spare[i], {} if self._memory else old
        return new


def _key(gradient: Array, x: Array) -> Hashable:
    """What tensors of a bucket have in common; ``None`` if one, which is flat ``x``, is in none."""
    xp = backend_of(x)
    if xp.dtype(gradient) != "float32" or loops_of(x) is None:
        return None
    return xp.__name__, _device(x)


def _device(x: Array) -> Hashable:
    return getattr(x, "device", None)


def dense_is_less(n: int, k: int, values: str, size: int) -> bool:
    """Return whether a dense sum of ``n`` elements over ``size`` ranks moves fewer bytes than an
    allgather of ``k`` entries."""
    # A header and an entry more or less do not decide.
    entries = sparse_size(k, n, values) - sparse_size(1, n, values)
    return size * entries > 2 * 4 * n
