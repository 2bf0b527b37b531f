"""Fused exchanges of symbols: when the graph runs, it calls the loops on the host, turn by turn.

While a graph is traced, arrays have no values that loops could take.  So an exchange becomes
functions of the graph, one more than it has requests.  The first takes the gradients and states of
all tensors, and returns the first message.  Each of those that follow takes a reply, and returns
the next message.  The last one returns averages and new states.  Between them the exchange, which
is that of NumPy arrays, waits for the replies.

Gradients are not copied on their way in, nor results on their way out: a variable that is assigned
one adopts its memory.  When it lets go of it, the array itself says: hence :class:`Memory`.  States
are written in place: the variable of a state has adopted an array of the step before, which is
found by its address.  A state that comes from elsewhere is copied.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import numpy as np

from hvd_compress.backends import Output, backend_of
from hvd_compress.backends.weak import weakly
from hvd_compress.base import Array, Averages, Context, Spec, State, Tensors
from hvd_compress.errors import ConfigError
from hvd_compress.requests import Collective, Request

#: of a context, what may be a symbol
_SYMBOLS = ("step", "epoch", "gradient_norm", "learning_rate")
_ALIGNMENT = 64  # bytes; libraries copy what does not begin at such an address


class Memory:
    """Float32 arrays whose memory is used again after they, and all views of them, are gone.

    An array that is taken is a new object over known memory, to which it alone leads.  When it is
    deleted, which views of it prevent, those of libraries included, the memory comes back here.

    Attributes:
        nbytes: of all that was ever needed at once.
        waiting: the plans whose exchanges wait for a reply.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.waiting: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self._free: dict[int, deque[np.ndarray]] = {}
        self._taken: dict[int, weakref.ref[np.ndarray]] = {}  # by address

    def take(self, n: int) -> np.ndarray:
        """Return an array of ``n`` elements, in which there is anything."""
        free = self._free.setdefault(n, deque())
        try:
            known = free.pop()  # in one step, like the append below: there may be several threads
        except IndexError:
            whole = np.empty(n + _ALIGNMENT // 4, np.float32)
            self.nbytes += whole.nbytes
            start = -whole.ctypes.data % _ALIGNMENT // whole.itemsize
            known = whole[start : start + n]
        taken = np.frombuffer(known.data, np.float32)
        address = known.ctypes.data

        def give_back(_: Any) -> None:
            del self._taken[address]
            free.append(known)

        self._taken[address] = weakref.ref(taken, give_back)
        return taken

    def own(self, x: np.ndarray) -> np.ndarray:
        """Return the array that was taken here and that ``x`` is a view of, else a copy in one that
        is taken now; flat."""
        reference = self._taken.get(x.ctypes.data)
        taken = None if reference is None else reference()
        if taken is None or taken.size != x.size:
            taken = self.take(x.size)
            np.copyto(taken, x.reshape(-1))
        return taken

    def abandon(self, names: frozenset[str] | None = None) -> None:
        """Give up the exchanges that wait for a reply, those of tensors of these names or all:
        their step has failed.  States that they have written become those of before."""
        for kept in list(self.waiting):
            if names is None or not names.isdisjoint(kept.names):
                kept.abandon()


class _Kept(dict[str, Any]):
    """The plan of a bucket that the graphs of a binding keep between their calls.

    Attributes:
        names: of the tensors.
        run: the number of the exchange that has begun last.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, names: Iterable[str], **entries: Any) -> None:
        super().__init__(**entries)
        self.names, self.run = frozenset(names), 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def during_call(self) -> Iterator[None]:
        """Raise ``ConfigError`` if another call runs: both would write to one memory.  Threads that
        overlap outside of these calls are not noticed."""
        if not self._lock.acquire(blocking=False):
            raise _two_at_once()
        try:
            yield
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Give up the exchange that waits for a reply, if there is one."""
        with self.during_call():
            self["memory"].waiting.discard(self)
            if (waiting := self.pop("waiting", None)) is not None:
                waiting.close()


def _two_at_once() -> ConfigError:
    """Return the error for two threads whose graphs exchange for one binding."""
    return ConfigError(
        "two threads run graphs of one compression at the same time, and its steps go one after "
        "the other: call the tf.function from one thread, or hold one threading.Lock() around "
        "every call; for models that train apart make an optimizer, or hvd.bind, for each"
    )


def exchange_on_host(
    plan: Any, tensors: Tensors, step: Context
) -> Generator[Request, Any, Averages]:
    """Run the exchange of a bucket of symbols, whose gradients are float32.

    Args:
        plan: that of the symbols, a :class:`hvd_compress.fused.in_place.InPlacePlan`; it says what
            is requested, and has no other use.
        tensors, step: see :class:`hvd_compress.base.Plan`.
    """
    assert tensors.flat is not None
    assert step.scratch is not None
    like, scratch = tensors.flat[0], step.scratch
    xp, calls = backend_of(like), _Calls(plan, tensors, step)
    # Graphs of a binding, and their branches, run one after the other; those of another number of
    # ranks never again.
    kept = scratch.get(calls.bucket_of)
    if kept is None or kept["size"] != step.size:
        memory = scratch.setdefault("memory", Memory())
        if kept is not None:  # the collector would put states back later, over those of new steps
            kept.abandon()
        kept = scratch[calls.bucket_of] = _Kept(plan.names, memory=memory, size=step.size)
    inputs, call = calls.inputs(tensors, step), calls.begin
    for request in plan.requests:
        outputs = [("int64", ()), *(_output(request, array) for array in request.arrays)]
        run, *sent = xp.on_host(weakly(kept, call), inputs, outputs, like)
        reply = yield request.carrying(sent)
        is_list = isinstance(reply, list)
        inputs = [run, *(reply if is_list else [reply])]
        call = functools.partial(calls.go_on, is_list)
    call = functools.partial(calls.finish, is_list)
    results = iter(xp.on_host(weakly(kept, call), inputs, calls.outputs(tensors), like))
    return calls.averages(results)


class _Calls:
    """The functions that a graph calls; it keeps them for ever, so there is no symbol in them."""

    def __init__(self, plan: Any, tensors: Tensors, step: Context) -> None:
        self._form, self._keys, self._momenta = plan.form, plan.keys, tensors.momenta
        self.bucket_of = "\n".join(["", *plan.names])
        self._counts_too = None in plan.counts
        self._symbols = [
            field for field in _SYMBOLS if not isinstance(getattr(step, field), int | float | None)
        ]
        none: dict[str, Any] = dict.fromkeys([*self._symbols, "scratch"])
        self._step, self._shapes = step._replace(**none), plan.shapes
        self._rows = [*zip(plan.names, plan.shapes, plan.weights, strict=True)]

    def inputs(self, tensors: Tensors, step: Context) -> list[Array]:
        found = [getattr(step, field) for field in self._symbols]
        for x, state in zip(tensors.flat or (), tensors.states, strict=True):
            found += [x, *(state[key] for key in self._keys)]
        return found

    def begin(self, kept: _Kept, *arrays: np.ndarray) -> list[Any]:
        """Begin an exchange, and return its number and what it sends first."""
        each = iter(arrays)
        now = {field: next(each).item() for field in self._symbols}
        memory, flat, states = kept["memory"], [], []
        memory.abandon(kept.names)
        with kept.during_call():
            for _ in self._rows:
                flat.append(next(each))
                states.append({key: memory.own(next(each)) for key in self._keys})
            gradients = [x.reshape(shape) for x, shape in zip(flat, self._shapes, strict=True)]
            step = self._step._replace(scratch=kept, **now)
            plan, specs = (
                kept.get("plan"),
                [Spec(*r, x) for r, x in zip(self._rows, flat, strict=True)],
            )
            if plan is None or not plan.is_for(self._form, specs, None, step):
                plan = kept["plan"] = self._form.plan(specs, None, step)
            kept.run += 1
            tensors = Tensors(gradients, states, "", self._momenta, flat)
            kept["states"], kept["waiting"] = states, plan.exchange(tensors, step)
            memory.waiting.add(kept)
            return [np.int64(kept.run), *_arrays_of(next(kept["waiting"]))]

    def go_on(self, is_list: bool, kept: _Kept, run: Any, *replies: np.ndarray) -> list[Any]:
        """Return the number of an exchange and what it sends after a reply."""
        with kept.during_call():
            waiting = self._waiting(kept, run)
            return [run, *_arrays_of(waiting.send(list(replies) if is_list else replies[0]))]

    def finish(self, is_list: bool, kept: _Kept, run: Any, *replies: np.ndarray) -> list[Any]:
        """Return the results of an exchange, one tensor after the other."""
        with kept.during_call():
            waiting, states = self._waiting(kept, run), kept.pop("states")
            del kept["waiting"]
            kept["memory"].waiting.discard(kept)
            try:
                waiting.send(list(replies) if is_list else replies[0])
            except StopIteration as stop:
                return self._results_of(stop.value, states)
        raise AssertionError("an exchange has requests of which its plan does not know")

    @staticmethod
    def _waiting(kept: _Kept, run: Any) -> Generator[Request, Any, Averages]:
        """Return the exchange of this number, unless another has begun in between."""
        if kept.run != run or "waiting" not in kept:
            raise _two_at_once()
        return kept["waiting"]

    def _results_of(self, averages: Averages, states: list[State]) -> list[Array]:
        found: list[Array] = [np.array(averages.counts, np.int64)] if self._counts_too else []
        for i, (direction, state) in enumerate(zip(averages.directions, states, strict=True)):
            own = averages.states.get(i, state)
            found += [direction, *(own[key] for key in self._keys)]
        return found

    def outputs(self, tensors: Tensors) -> list[Output]:
        """Return what a graph has to know of these results."""
        xp = backend_of(tensors.gradients[0])
        found: list[Output] = [("int64", (len(self._rows),))] if self._counts_too else []
        for gradient, state in zip(tensors.gradients, tensors.states, strict=True):
            shapes = [xp.shape(gradient), *(xp.shape(state[key]) for key in self._keys)]
            found += [("float32", shape) for shape in shapes]
        return found

    def averages(self, results: Iterator[Array]) -> Averages:
        counts, directions, states = None, [], {}
        if self._counts_too:
            symbol = next(results)
            counts = backend_of(symbol).unstack(symbol)
        for i in range(len(self._rows)):
            directions.append(next(results))
            states[i] = {key: next(results) for key in self._keys}
        return Averages(directions, states, counts)


def _output(request: Collective, array: np.ndarray) -> Output:
    """Return what a graph has to know of what is sent."""
    return array.dtype.name, array.size if getattr(request, "equal_sizes", True) else None


def _arrays_of(request: Request) -> list[np.ndarray]:
    assert isinstance(request, Collective)
    return list(request.arrays)
