"""The base of forms of whole buckets that write their results in place.

The arrays of a bucket are gradients, the states of their tensors, and where the results are
written, which most often is in the gradients.  States become the new ones when it is known that the
values of all ranks are finite.  Enough of the step is kept until then.  So they need no second
copy, and a step with a NaN or Inf on any rank leaves them as they were.

Some forms write new states where the old ones are as soon as they are computed, in the pass over
memory that reads these.  The old ones are kept until the step is over (:class:`OldStates`).  One
state of each tensor is kept where its result will be written, which nobody needs before.  Other
states are kept in memory that buckets pass on to each other.  It suffices for one bucket at a time;
a bucket that finds none writes its states in a second pass.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Array,
    Averages,
    Context,
    Place,
    Plan,
    Sparse,
    Spec,
    State,
    Tensors,
)
from hvd_compress.chain import Transform, in_range
from hvd_compress.errors import CompressionError
from hvd_compress.fused.on_host import Memory, exchange_on_host
from hvd_compress.kernels.arrays import MOVED, Column
from hvd_compress.requests import Collective, Request
from hvd_compress.times import begin_phase

_LOOPS = "hvd_compress.kernels"


def is_on_host(x: Array) -> bool:
    """Return whether the loops for host memory take an array."""
    found: bool = backend_of(x).loops(x) == _LOOPS
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class InPlaceForm(abc.ABC):
    """A form, see :class:`hvd_compress.base.Form`, whose plans are :class:`InPlacePlan`."""

    #: as many elements of a tensor are sent as it has, not as many as it weighs
    sends_all: ClassVar[bool] = True
    #: results may be sparse
    makes_sparse: ClassVar[bool] = False
    #: half precisions are taken, too, widened to float32
    takes_halves: ClassVar[bool] = False
    #: see :class:`hvd_compress.base.Outcome`
    additive: ClassVar[bool] = True
    #: transforms without a state that come first
    before: tuple[Transform, ...]

    def place(self, gradient: Array, context: Context) -> Place | None:
        """Take what is exchanged as float32."""
        xp = backend_of(gradient)
        if context.sparse and not self.makes_sparse:
            return None
        is_widened = xp.dtype(gradient) != "float32"
        if is_widened and (not self.takes_halves or xp.traces or context.sparse):
            return None  # what comes back would be float32
        if None in context.shape or not xp.size(gradient):
            return None
        if (weight := self.weight(context)) is None:
            return None
        x = self.flat(gradient, context)
        if xp.dtype(x) != "float32" or not self.takes(x):
            return None
        return Place(self, weight, (xp.__name__, getattr(x, "device", None)), x)

    def flat(self, gradient: Array, context: Context) -> Array:
        """Return what is exchanged of a gradient, flat."""
        x = backend_of(gradient).widen(gradient)
        for transform in self.before:
            x, _ = transform.update(x, {}, context)
        return x

    def takes(self, x: Array) -> bool:
        """Return whether a flat float32 array is in memory that this form is for."""
        return is_on_host(x)

    @abc.abstractmethod
    def weight(self, context: Context) -> int | None:
        """Return the weight of a tensor of ``context.shape``, the same on all ranks; ``None`` if it
        is not taken in this step."""

    @abc.abstractmethod
    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> InPlacePlan:
        """See :class:`hvd_compress.base.Form`."""


class InPlacePlan(Plan):
    """The plan of a bucket.

    Attributes:
        xp: the backend of the arrays.
        keys: of the states that are used.
        sizes: of the tensors.
        requests: of an exchange in host memory, in their turn, with arrays like those that will be
            sent; a graph has to know them beforehand.
    """

    form: Any
    keys: tuple[str, ...]
    requests: Sequence[Collective] = ()

    def __init__(self, form: Any, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        super().__init__(form, specs, key, step)
        self.xp = backend_of(specs[0].x)
        self.sizes = [self.xp.size(spec.x) for spec in specs]
        self.counts = self.sizes if form.sends_all else self.weights
        self.additive = form.additive
        self._device = getattr(specs[0].x, "device", None)
        #: of a graph
        self.memory: Memory | None = (step.scratch or {}).get("memory")

    def sizes_of(self, key: str) -> list[int]:
        """Return the sizes of an entry of the states."""
        return self.sizes

    @functools.cached_property
    def lengths(self) -> list[int]:
        """The sizes of all gradients and states, in the order of the keys."""
        columns = [self.sizes, *map(self.sizes_of, self.keys)]
        return [n for sizes in columns for n in sizes]

    def addresses(self, arrays: Sequence[Array], lengths: Sequence[int]) -> list[int] | None:
        """Return where arrays of these lengths are; ``None`` unless all are float32, contiguous and
        on the device of the bucket."""
        return self.xp.addresses(arrays, lengths, "float32", self._device)

    def takes(self, tensors: Tensors) -> bool:
        if self.form.before:
            return False
        arrays = [*tensors.gradients]
        for key in self.keys:
            if (column := column_of(tensors, key)) is None:
                return False
            arrays += column
        return self.addresses(arrays, self.lengths) is not None

    def exchange(self, tensors: Tensors, step: Context) -> Generator[Request, Any, Averages]:
        gradients, x = tensors.gradients, tensors.flat
        xp, is_known = self.xp, x is None
        if xp.traces:
            return (yield from exchange_on_host(self, tensors, step))
        x = gradients if x is None else x
        states = {key: column_of(tensors, key) or [] for key in self.keys}
        if not is_known:
            states = {key: [flat(each) for each in column] for key, column in states.items()}
        dtypes = ["float32"] if is_known else [xp.dtype(gradient) for gradient in gradients]
        out = self.results_for(x, dtypes, step)
        arrays = Arrays(self, x, states, out, tensors.momenta)
        arrays.dtypes = dtypes
        meeting, reply = self.meet(arrays, step), None
        with contextlib.closing(meeting):
            while True:
                try:
                    request = meeting.send(reply)
                except StopIteration as stop:
                    finite: Sequence[bool] | np.ndarray | None = stop.value
                    break
                reply = yield request
                arrays.check()
        begin_phase("other")
        directions: Sequence[Any] = out
        if arrays.sparse is not None:
            directions = arrays.sparse
        elif out is not gradients:
            directions = list(map(in_place_of, gradients, out))
        new: dict[int, State] = {}
        finite = [True] * len(self.sizes) if finite is None else finite
        if not is_known or not all(finite):
            new = dict(enumerate(settled(arrays.by_tensor(), finite)))
            if is_known:  # others are where the old ones were
                new = {i: state for i, state in new.items() if not finite[i]}
        return Averages(directions, new, arrays.counts)

    def results_for(
        self, x: Sequence[Array], dtypes: Sequence[str], step: Context
    ) -> Sequence[Array]:
        """Return where results are written, given what is exchanged of gradients of these
        dtypes."""
        return x if step.in_place else [self.empty(each) for each in x]

    def empty(self, like: Array) -> Array:
        """Return memory for a result like ``like``."""
        xp = backend_of(like)
        n = xp.size(like)
        return xp.zeros(n, like) if self.memory is None else self.memory.take(n)

    @abc.abstractmethod
    def meet(
        self, arrays: Arrays, step: Context
    ) -> Generator[Request, Any, Sequence[bool] | np.ndarray | None]:
        """Write results and states; return of which tensors they are finite.

        ``None``: the states of others are those of before already, since a device does not tell the
        host.
        """


def column_of(tensors: Tensors, key: str) -> list[Array] | None:
    """Return an entry of the state of each tensor; ``None`` if one has none."""
    try:
        return list(map(operator.itemgetter(tensors.prefix + key), tensors.states))
    except KeyError:
        return None


class Views(NamedTuple):
    """The arrays of a bucket as flat ones of NumPy, in the same memory, while nobody else runs."""

    x: list[np.ndarray]
    out: list[np.ndarray]
    states: dict[str, list[np.ndarray]]

    def states_at(self, tensor: int, own: slice, keys: Sequence[str]) -> dict[str, np.ndarray]:
        """Return a run of elements of some entries of a tensor's state."""
        return {key: self.states[key][tensor][own] for key in keys}


class Arrays:
    """The arrays of a bucket in one step: gradients, states, and where the results are written.

    Attributes:
        counts: how many elements of each tensor were sent, where the plan does not say it.
        sparse: the averages, where they are not written.
        dtypes: of the gradients.
        columns: gradients, where results are written, and states in the order of the bucket's keys.
    """

    def __init__(
        self,
        bucket: InPlacePlan,
        gradients: Sequence[Array],
        states: dict[str, list[Array]],
        out: Sequence[Array],
        momenta: Sequence[float],
    ) -> None:
        self.gradients, self.momenta = gradients, momenta
        self.sparse: list[Sparse] | None = None
        self.counts: list[int] | None = None
        self.dtypes = ["float32"]
        self._plan, self.states, self._arrays = bucket, states, [*gradients]
        columns, count = [gradients, *states.values()], len(gradients)
        sizes, lengths = [bucket.sizes, *map(bucket.sizes_of, states)], bucket.lengths
        if out is not gradients:
            columns.insert(1, out)
            sizes.insert(1, bucket.sizes)
            lengths = [*bucket.sizes, *lengths]
        for column in columns[1:]:
            self._arrays += column
        self._lengths = lengths
        if (found := bucket.addresses(self._arrays, lengths)) is None:
            raise CompressionError(MOVED)
        self._found, places = found, np.array(found, np.int64).reshape(-1, count)
        self.columns = list(map(Column, columns, sizes, places))
        if out is gradients:
            self.columns.insert(1, self.columns[0])

    def context(self, step: Context, tensor: int) -> Context:
        """Return what transforms are told of the step of a tensor."""
        return step._replace(momentum=self.momenta[tensor])

    def by_tensor(self) -> list[State]:
        if not self.states:
            return [{} for _ in self.gradients]
        rows = zip(*self.states.values(), strict=True)
        return [dict(zip(self.states, row, strict=True)) for row in rows]

    def check(self) -> None:
        """Look for all arrays in every turn of this rank again, since an array is not its memory.

        Raises:
            CompressionError: one has other memory than when the step began.
        """
        if self._plan.addresses(self._arrays, self._lengths) != self._found:
            raise CompressionError(MOVED)

    @functools.cached_property
    def views(self) -> Views:
        """The same as arrays of NumPy, which keep their memory until the exchange is over."""
        flat, count = self._plan.xp.flat_on_host(self._arrays), len(self.gradients)
        x, *states = (flat[i : i + count] for i in range(0, len(flat), count))
        out = states.pop(0) if len(states) > len(self.states) else x
        return Views(x, out, dict(zip(self.states, states, strict=True)))


class _ThreadMemory(threading.local):
    """Memory for one tensor at a time, in whatever bucket."""

    rows = np.empty((2, 0), np.float32)


_thread_memory = _ThreadMemory()


def two_rows(n: int) -> np.ndarray:
    """Return two arrays of ``n`` elements or more, which nothing keeps beyond a turn."""
    if _thread_memory.rows.shape[1] < n:
        _thread_memory.rows = np.empty((2, n), np.float32)
    return _thread_memory.rows


def in_place_of(gradient: Array, x: Array) -> Array:
    """Return the result ``x``, flat, as an array like the gradient: this itself, if it is there."""
    xp = backend_of(gradient)
    return gradient if xp.address(x) == xp.address(gradient) else xp.restore(x, gradient)


def flat(x: Array) -> Array:
    """Return ``x``, or what takes its place if it was given memory with other strides."""
    xp = backend_of(x)
    return xp.copy(x) if xp.address(x) is None else x


def settled(states: Sequence[State], finite: Sequence[bool] | np.ndarray) -> list[State]:
    """Return the states after the step, which were written in place where it was finite."""
    rows = zip(states, finite, strict=True)
    return [dict(state) if fine else in_range(state) for state, fine in rows]


class SpareMemory:
    """Memory that buckets hand on to each other as long as there are any, for one at a time."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._is_taken = False
        self._lock = threading.Lock()

    def take(self, n: int) -> np.ndarray | None:
        """Return memory of at least ``n`` float32, ``None`` if another bucket has it."""
        with self._lock:
            if self._is_taken:
                return None
            if not self._free or self._free[0].size < n:
                self._free = [np.empty(n, np.float32)]
            self._is_taken = True
            return self._free.pop()

    def give(self, x: np.ndarray) -> None:
        with self._lock:
            self._free, self._is_taken = [x], False


_shared: weakref.ref[SpareMemory] | None = None
_lock = threading.Lock()


def spare_memory() -> SpareMemory:
    """Return those of this process, which live as long as who holds them."""
    global _shared
    with _lock:
        found = None if _shared is None else _shared()
        if found is None:
            found = SpareMemory()
            _shared = weakref.ref(found)
        return found


class OldStates:
    """The old states of the tensors of a bucket in a step.

    Args:
        states: of each state, flat arrays in its memory, one per tensor.
        places: the same, where each is kept.
        columns: of these places.
        spare: the memory of all but the first, and the pool that it was taken from.

    Attributes:
        columns: see the argument.
        holds: the old states are there, and the new ones in their places.
    """

    def __init__(
        self,
        states: Sequence[Sequence[np.ndarray]],
        places: list[list[np.ndarray]],
        columns: list[Column],
        spare: tuple[SpareMemory, np.ndarray] | None,
    ) -> None:
        self._states, self._places, self.columns, self._spare = states, places, columns, spare
        self.holds = False

    @classmethod
    def of(
        cls,
        states: Sequence[Sequence[np.ndarray]],
        out: list[np.ndarray],
        at_out: Column,
        pool: SpareMemory,
    ) -> OldStates | None:
        """Return where states are kept; ``None`` if there is no room.

        Args:
            states: of each state, flat arrays in its memory, one per tensor.
            out: arrays where results are written, ``at_out``; the first state is kept there.
            pool: has memory for the others.
        """
        if overlap(at_out):  # what is kept of one tensor would be another's gradient
            return None
        places, columns, spare, count = [out], [at_out], None, len(states) - 1
        if count:
            bounds = np.cumsum([0, *at_out.sizes])
            n = int(bounds[-1])
            if (memory := pool.take(count * n)) is None:
                return None
            spare = pool, memory
            for own in memory[: count * n].reshape(count, n):
                places.append(np.split(own, bounds[1:-1]))
                starts = own.ctypes.data + own.itemsize * bounds[:-1]
                columns.append(Column(places[-1], at_out.sizes, starts))
        return cls(states, places, columns, spare)

    def put_back(self, tensors: Sequence[int] | None = None) -> None:
        """Write old states where they were, of some tensors or all."""
        for states, places in zip(self._states, self._places, strict=True):
            for i in range(len(states)) if tensors is None else tensors:
                np.copyto(states[i], places[i])

    def close(self) -> None:
        """Hand the memory on."""
        if self._spare is not None:
            pool, memory = self._spare
            self._spare = None
            pool.give(memory)


def overlap(column: Column) -> bool:
    """Return whether two arrays have memory in common."""
    order = np.argsort(column.addresses)
    starts, sizes = column.addresses[order], np.array(column.sizes)[order]
    return bool((starts[:-1] + 4 * sizes[:-1] > starts[1:]).any())
