"""The base of forms of whole buckets that write their results in place.

The arrays of a bucket are gradients, the states of their tensors, and where the results are
written, which most often is in the gradients.  States become the new ones when it is known that the
values of all ranks are finite, from what is kept of the step until then.  So they need no second
copy; and a step with a NaN or Inf on any rank leaves them as they were.
"""

from __future__ import annotations

import abc
import dataclasses
import threading
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Outcome, Sparse, State
from hvd_compress.chain import Repeated, Transform, in_range
from hvd_compress.fused.messages import stand_in
from hvd_compress.fused.on_host import Memory, exchange_on_host
from hvd_compress.kernels import Column, are_flat
from hvd_compress.kernels.arrays import check_places
from hvd_compress.requests import Collective, Joint, Request

_LOOPS = "hvd_compress.kernels"


def is_on_host(x: Array) -> bool:
    """Return whether the loops for host memory take an array."""
    found: bool = backend_of(x).loops(x) == _LOOPS
    return found


class Tensor(NamedTuple):
    """One tensor of a bucket in one step: the gradient as it was given, flat as ``x``; the weight
    of its request; and the context, of which what is of the step is the same for all tensors."""

    gradient: Array
    x: Array
    state: State
    weight: int
    context: Context


@dataclasses.dataclass(frozen=True, eq=False)
class InPlace(abc.ABC):
    """The exchange of all tensors of a bucket; see :class:`hvd_compress.requests.Joint`, and
    :class:`hvd_compress.chain.Fused` for its methods."""

    sends_all: ClassVar[bool] = True
    #: results may be sparse
    makes_sparse: ClassVar[bool] = False
    #: transforms without a state that come first
    before: tuple[Transform, ...]

    def request(self, gradient: Array, state: State, context: Context) -> Joint | None:
        """Take float32."""
        xp = backend_of(gradient)
        if context.scratch is None or context.sparse or xp.dtype(gradient) != "float32":
            return None
        context = context._replace(shape=xp.shape(gradient))
        if None in context.shape or not xp.size(gradient):
            return None
        if (weight := self.weight(context)) is None:
            return None
        x = xp.widen(gradient)
        for transform in self.before:
            x, _ = transform.update(x, {}, context)
        if not self.takes(x):
            return None
        key = xp.__name__, getattr(x, "device", None)
        return Joint(self, Tensor(gradient, x, state, weight, context), weight, key)

    def takes(self, x: Array) -> bool:
        """Return whether a flat float32 array is in memory that this form is for."""
        return is_on_host(x)

    @property
    def finishes(self) -> bool:
        """Whether the direction of the step is not the average."""
        return False

    @property
    def additive(self) -> bool:
        """See :class:`hvd_compress.base.Outcome`."""
        return True

    @abc.abstractmethod
    def weight(self, context: Context) -> int | None:
        """Return the weight of the request of a tensor of ``context.shape``, the same on all ranks;
        ``None`` if it is not taken in this step."""

    @abc.abstractmethod
    def made(self, tensors: list[Tensor]) -> Bucket:
        """Return what is kept of a bucket."""

    def __call__(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        xp, step = backend_of(tensors[0].x), tensors[0].context
        if xp.traces:
            return (yield from exchange_on_host(self, tensors, self.made(tensors)))
        bucket = self._bucket(tensors)
        states = {key: [flat(t.state[key]) for t in tensors] for key in bucket.keys}
        gradients = [t.x for t in tensors]
        out = gradients if step.in_place else [bucket.empty(x) for x in gradients]
        momenta = [t.context.momentum for t in tensors]
        arrays = Arrays(bucket, gradients, states, out, momenta, looked_at=step.needs_sent)
        arrays.dtypes = [xp.dtype(t.gradient) for t in tensors]
        finite = yield from bucket.meet(arrays, step)
        outcomes, new = [], settled(arrays.by_tensor(), finite, arrays.new)
        for i, (tensor, x) in enumerate(zip(tensors, out, strict=True)):
            mean = in_place_of(tensor.gradient, x)
            update, sent = None, stand_in((arrays.counts or bucket.counts)[i])
            if arrays.sparse is not None:
                mean = arrays.sparse[i]
            if arrays.means is not None:
                mean, update = _restored(arrays.means[i], tensor.gradient), mean
            if arrays.sent is not None:
                sent = _of_backend(arrays.sent[i], tensor.x)
            outcomes.append(Outcome(mean, sent, new[i], update, self.additive))
        return outcomes

    def again(
        self, tensors: Repeated, key: Hashable, context: Context
    ) -> Generator[Request, Any, tuple[Sequence[Array | Sparse], Mapping[int, State]]] | None:
        bucket = tensors.scratch.get("bucket")
        if self.before or bucket is None or bucket.form is not self:
            return None
        if context.sparse and not self.makes_sparse:
            return None
        if context.sums and not self.additive:
            return None
        if bucket.rank != context.rank or (states := bucket.states_of(tensors)) is None:
            return None
        return self._again(bucket, tensors, states, context)

    def _again(
        self, bucket: Bucket, tensors: Repeated, states: dict[str, list[Array]], context: Context
    ) -> Generator[Request, Any, tuple[Sequence[Array | Sparse], Mapping[int, State]]]:
        gradients = tensors.gradients
        arrays = Arrays(bucket, gradients, states, gradients, tensors.momenta)
        finite = yield from bucket.meet(arrays, context)
        directions = gradients if arrays.sparse is None else arrays.sparse
        if arrays.new is None and all(finite):
            return directions, {}
        return directions, dict(enumerate(settled(arrays.by_tensor(), finite, arrays.new)))

    def _bucket(self, tensors: list[Tensor]) -> Bucket:
        """The record of a bucket between steps, in the first tensor's scratch."""
        scratch = tensors[0].context.scratch
        assert scratch is not None
        bucket: Bucket | None = scratch.get("bucket")
        # That of what a switch began with is of another form.
        if bucket is None or bucket.form is not self or bucket.look != look_of(tensors):
            bucket = scratch["bucket"] = self.made(tensors)
        return bucket


class Bucket(abc.ABC):
    """The record of a bucket.

    Attributes:
        keys: of the states that are used.
        counts: how many elements of each tensor are sent; ``None`` if only the sender knows.
        requests: of an exchange in host memory, in their turn, with arrays like those that will be
            sent; a graph has to know them beforehand.
    """

    keys: tuple[str, ...]
    requests: Sequence[Collective] = ()
    #: new states take the place of the old ones, also where others may look at these
    writes_states: ClassVar[bool] = True

    def __init__(self, form: InPlace, tensors: list[Tensor]) -> None:
        self.form, self.look = form, look_of(tensors)
        self.rank, self.size = tensors[0].context.rank, tensors[0].context.size
        self.shapes = [t.context.shape for t in tensors]
        self.names = [t.context.name for t in tensors]
        self.sizes = [backend_of(t.x).size(t.x) for t in tensors]
        self.weights = [t.weight for t in tensors]
        self.counts: Sequence[int | None] = self.sizes if form.sends_all else self.weights
        self.memory: Memory | None = (tensors[0].context.scratch or {}).get("memory")

    def sizes_of(self, key: str) -> list[int]:
        """Return the sizes of an entry of the states."""
        return self.sizes

    def states_of(self, tensors: Repeated) -> dict[str, list[Array]] | None:
        """Return the states of what may be the bucket's tensors, by key, in arrays that can be
        written to; ``None`` if it is something else."""
        device, states = self.look[1], {}
        if self.weights != list(tensors.weights):
            return None
        if not are_flat(tensors.gradients, self.sizes, device):
            return None
        for key in self.keys:
            column = tensors.column(key)
            if column is None or not are_flat(column, self.sizes_of(key), device):
                return None
            states[key] = column
        return states

    def empty(self, like: Array) -> Array:
        """Return memory for a result like ``like``."""
        xp = backend_of(like)
        n = xp.size(like)
        return xp.zeros(n, like) if self.memory is None else self.memory.take(n)

    @abc.abstractmethod
    def meet(
        self, arrays: Arrays, step: Context
    ) -> Generator[Request, Any, Sequence[bool] | np.ndarray]:
        """Write results, states, and what was sent, if that is asked for; return of which tensors
        they are finite."""


class Views(NamedTuple):
    """The arrays of a bucket as flat ones of NumPy, in the same memory, while nobody else runs; and
    arrays for the averages, where somebody looks at these and they are not what is in ``out``."""

    x: list[np.ndarray]
    out: list[np.ndarray]
    states: dict[str, list[np.ndarray]]
    means: list[np.ndarray] | None

    def states_at(self, tensor: int, own: slice, keys: Sequence[str]) -> dict[str, np.ndarray]:
        """Return a run of elements of some entries of a tensor's state."""
        return {key: self.states[key][tensor][own] for key in keys}


class Arrays:
    """The arrays of a bucket in one step: gradients, states, and where the results are written.

    Attributes:
        sent: what was sent of each tensor, to be set where ``looked_at``; else ``None``.
        counts: how many elements of each tensor were sent, where weights do not say it.
        means: see :class:`Views`.
        sparse: the averages, where they are not written.
        new: states that take the place of the old ones, where these are not written.
        dtypes: of the gradients.
    """

    def __init__(
        self,
        bucket: Bucket,
        gradients: Sequence[Array],
        states: dict[str, list[Array]],
        out: Sequence[Array],
        momenta: Sequence[float],
        *,
        looked_at: bool = False,
    ) -> None:
        self.gradients, self.momenta = gradients, momenta
        self.sent: list[Any] | None = None
        self.sparse: list[Sparse] | None = None
        self.counts: list[int] | None = None
        self.new: list[State] | None = None
        self.dtypes = ["float32"]
        self.means: list[np.ndarray] | None = None
        self._views: Views | None = None
        if looked_at:
            self.sent = [np.empty(n, np.float32) for n in bucket.sizes]
            if bucket.form.finishes:
                self.means = [np.empty(n, np.float32) for n in bucket.sizes]
        self.states = states
        sizes = [bucket.sizes, bucket.sizes, *map(bucket.sizes_of, bucket.keys)]
        self._parts = list(zip([gradients, out, *self.states.values()], sizes, strict=True))
        self._places = [column.addresses for column in self._now()]

    def context(self, step: Context, tensor: int) -> Context:
        """Return what transforms are told of the step of a tensor."""
        return step._replace(momentum=self.momenta[tensor])

    def _now(self) -> list[Column]:
        (x, sizes), (out, _), *states = self._parts
        gradients = Column(x, sizes)
        results = gradients if out is x else Column(out, sizes)
        return [gradients, results, *(Column(arrays, sizes) for arrays, sizes in states)]

    def by_tensor(self) -> list[State]:
        """Return the states of each tensor."""
        if not self.states:
            return [{} for _ in self.gradients]
        rows = zip(*self.states.values(), strict=True)
        return [dict(zip(self.states, row, strict=True)) for row in rows]

    def columns(self) -> list[Column]:
        """Return gradients, where results are written, and states in the order of the bucket's
        keys; in every turn of this rank anew, since an array is not its memory.

        Raises:
            CompressionError: an array has other memory than when the step began.
        """
        columns = self._now()
        check_places(columns, self._places)
        return columns

    def views(self) -> Views:
        """Return the same as arrays of NumPy.  They are made once, and keep their memory until the
        exchange is over."""
        columns = self.columns()
        if self._views is None:
            x, out, *states = (column.flat_on_host() for column in columns)
            self._views = Views(x, out, dict(zip(self.states, states, strict=True)), self.means)
        return self._views


def look_of(tensors: list[Tensor]) -> Any:
    """Return what a bucket of these tensors is kept for."""
    rank, device = tensors[0].context.rank, getattr(tensors[0].x, "device", None)
    return rank, device, [(t.context.name, t.context.shape, t.weight) for t in tensors]


class _Rooms(threading.local):
    """Memory for one tensor at a time, whatever the bucket."""

    room = np.empty((2, 0), np.float32)


_rooms = _Rooms()


def room(n: int) -> np.ndarray:
    """Return two arrays of ``n`` elements or more, which nothing keeps beyond a turn."""
    if _rooms.room.shape[1] < n:
        _rooms.room = np.empty((2, n), np.float32)
    return _rooms.room


def _restored(mean: np.ndarray, gradient: Array) -> Array:
    xp = backend_of(gradient)
    return xp.restore(xp.from_numpy(mean, gradient), gradient)


def _of_backend(sent: Any, like: Array) -> Any:
    from_numpy = backend_of(like).from_numpy
    if isinstance(sent, Sparse):
        return Sparse(*(from_numpy(part, like) for part in sent))
    return from_numpy(sent, like)


def in_place_of(gradient: Array, x: Array) -> Array:
    """Return the result ``x``, flat, as an array like the gradient: this itself, if it is there."""
    xp = backend_of(gradient)
    return gradient if xp.address(x) == xp.address(gradient) else xp.restore(x, gradient)


def flat(x: Array) -> Array:
    """Return ``x``, or what takes its place if it was given memory with other strides."""
    xp = backend_of(x)
    return xp.copy(x) if xp.address(x) is None else x


def settled(
    states: Sequence[State],
    finite: Sequence[bool] | np.ndarray,
    new: Sequence[State] | None = None,
) -> list[State]:
    """Return the states after the step, which were written in place, or are ``new``, where it was
    finite."""
    rows = zip(states, finite, states if new is None else new, strict=True)
    return [dict(its_new) if fine else in_range(old) for old, fine, its_new in rows]
