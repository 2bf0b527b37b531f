"""Clocks that find where the time of exchanges goes.

A :class:`Clock` divides the time that passes in a reducer's calls among phases.  The innermost
``with phase(...)`` counts, so that nothing is counted twice.  What happens in between, while
backward goes on and messages are on their way, is not counted: it costs the caller no time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds on this rank, in total over ``steps`` steps.

    Attributes:
        search: finding what is sent, in one pass with momentum and error feedback.
        encode: making messages.
        wait: sending, and waiting for the other ranks and the network.
        add_up: decoding messages and adding them up.
        other: Python for each tensor and bucket; and, where a method has no loops for whole
            buckets, its compression and decompression.
        hidden: from the first bucket of a step that was sent to the call that waits for all: what
            goes on meanwhile, such as backward, hides the exchange.  Not a part of ``total``.
        steps: the number of steps.
    """

    search: float = 0.0
    encode: float = 0.0
    wait: float = 0.0
    add_up: float = 0.0
    other: float = 0.0
    hidden: float = 0.0
    steps: int = 0

    @property
    def total(self) -> float:
        """The seconds of all phases."""
        return sum(getattr(self, name) for name in PHASES)

    def line(self) -> str:
        """Return the milliseconds of a step in one line."""
        each = [f"{name.replace('_', ' ')} {self._of_a_step(name):.1f}" for name in PHASES]
        total = 1000 * self.total / max(self.steps, 1)
        return f"{total:.1f} ms a step: {', '.join(each)}; hidden {self._of_a_step('hidden'):.1f}"

    def _of_a_step(self, name: str) -> float:
        return 1000 * getattr(self, name) / max(self.steps, 1)


@dataclasses.dataclass
class BucketTimes:
    """Seconds of one bucket on this rank, in total over ``steps`` steps.

    Attributes:
        search, encode, add_up: as in :class:`Times`.
        other: the rest of what this rank computes for the bucket.
        wait: what this rank waited while the bucket was under way.  Buckets are waited for
            together, so their sum may be more than the wait of all.
        under_way: from each request to its reply, whatever this rank did meanwhile.
        steps: the number of steps.
    """

    search: float = 0.0
    encode: float = 0.0
    wait: float = 0.0
    add_up: float = 0.0
    other: float = 0.0
    under_way: float = 0.0
    steps: int = 0


PHASES = ("search", "encode", "wait", "add_up", "other")
_current: ContextVar[Clock | None] = ContextVar("clock", default=None)


class Clock:
    """Counts the seconds of each phase.

    Args:
        now: returns seconds since any time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.reset()
        self._phase: str | None = None
        self._since = 0.0

    def reset(self) -> None:
        """Begin again at zero."""
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._hidden, self._left_at = 0.0, math.inf
        self.steps = 0
        #: by the names of the tensors in a bucket
        self.buckets: dict[tuple[str, ...], BucketTimes] = {}

    @property
    def times(self) -> Times:
        """The seconds so far."""
        return Times(**self._seconds, hidden=self._hidden, steps=self.steps)

    def running(self) -> running:
        """Return a context in which everything is counted, as "other" where no :class:`phase` says
        what it is."""
        return running(self)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is counted."""
        before = self.switch(None)
        try:
            yield
        finally:
            self.switch(before)

    def leaves(self) -> None:
        """Note that a bucket is sent."""
        self._left_at = min(self._left_at, self.now())

    def awaited(self) -> None:
        """Note that all buckets are waited for from now on."""
        if self._left_at < math.inf:
            self._hidden += self.now() - self._left_at
        self._left_at = math.inf

    def switch(self, phase: str | None) -> str | None:
        """Begin another phase, and return the one that ends; ``None``: none, nothing is counted."""
        now, before = self.now(), self._phase
        if before is not None:
            self._seconds[before] += now - self._since
        self._phase, self._since = phase, now
        return before

    def watch(
        self, names: Sequence[str], exchange: Generator[Any, Any, Any]
    ) -> Generator[Any, Any, Any]:
        """Return the exchange of a bucket, whose time is counted."""
        own = self.buckets.setdefault(tuple(names), BucketTimes())
        reply, is_over, result = None, False, None
        while not is_over:
            before = self._read()
            try:
                request = exchange.send(reply)
            except StopIteration as stop:
                is_over, result = True, stop.value
            left = self._read()
            named = 0.0
            for key in ("search", "encode", "add_up"):
                named += (seconds := left[key] - before[key])
                setattr(own, key, getattr(own, key) + seconds)
            own.other += left["now"] - before["now"] - named
            if not is_over:
                reply = yield request
                came = self._read()
                own.wait += came["wait"] - left["wait"]
                own.under_way += came["now"] - left["now"]
        own.steps += 1
        return result

    def _read(self) -> dict[str, float]:
        """Return the seconds of each phase up to now, and what time that is."""
        self.switch(self._phase)
        return {**self._seconds, "now": self._since}


def watched(names: Sequence[str], exchange: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Return the exchange of a bucket, counted by the clock that runs, if one does."""
    clock = _current.get()
    return exchange if clock is None else clock.watch(names, exchange)


def leaves() -> None:
    """Note for the clock that runs that a bucket is sent."""
    if (clock := _current.get()) is not None:
        clock.leaves()


class running:
    """See :meth:`Clock.running`."""

    __slots__ = ("_before", "_clock", "_token")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._token, self._before = _current.set(self._clock), self._clock.switch("other")

    def __exit__(self, *_: object) -> None:
        self._clock.switch(self._before)
        _current.reset(self._token)


class phase:
    """``with phase("search"):`` counts what happens inside for the clock that runs, if one does."""

    __slots__ = ("_before", "_clock", "_name")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._clock = _current.get()
        if self._clock is not None:
            self._before = self._clock.switch(self._name)

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.switch(self._before)
