"""Clocks that find where the time of exchanges goes.

A :class:`Clock` divides the time that passes in a reducer's calls among phases.  One begins
where another ends, so that nothing is counted twice.  The time between the calls, while backward
goes on and messages are on their way, is not counted: it costs the caller nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn


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
        hidden: from the first bucket of a step that was sent to the call that waits for all.  The
            work meanwhile, such as backward, hides the exchange.  Not a part of ``total``.
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
    """Counts the seconds of each phase.  In ``with clock:`` everything is counted, as "other" where
    no :func:`begin_phase` says what it is.

    Args:
        now: returns seconds since any time.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.reset()
        self._phase: str | None = None  # nothing is counted
        self._since = 0.0
        self._around: list[tuple[Clock | None, str | None]] = []  # what goes on after a context

    def reset(self) -> None:
        seconds: dict[str | None, float] = dict.fromkeys((None, *PHASES), 0.0)
        self._seconds = seconds
        self._hidden, self._left_at = 0.0, math.inf
        self.steps = 0
        #: by the names of the tensors in a bucket
        self.buckets: dict[tuple[str, ...], BucketTimes] = {}

    @property
    def times(self) -> Times:
        """The seconds so far."""
        seconds = {phase: self._seconds[phase] for phase in PHASES}
        return Times(**seconds, hidden=self._hidden, steps=self.steps)

    def __enter__(self) -> None:
        self._around.append((_current.get(), self.switch("other")))
        _current.set(self)

    def __exit__(self, *_: object) -> None:
        clock, phase = self._around.pop()
        self.switch(phase)
        _current.set(clock)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which nothing is counted, whatever phases begin."""
        clock, phase = _current.get(), self.switch(None)
        _current.set(None)
        try:
            yield
        finally:
            _current.set(clock)
            self.switch(phase)

    def awaited(self) -> None:
        """Note that all buckets are waited for from now on."""
        if math.isfinite(self._left_at):
            self._hidden += self.now() - self._left_at
        self._left_at = -math.inf  # nothing that is sent from now on is hidden

    def begin_step(self) -> None:
        """Note that no bucket of the next step is sent yet."""
        self._left_at = math.inf

    def switch(self, phase: str | None) -> str | None:
        """Begin another phase, and return the one that ends; ``None``: none, nothing is counted."""
        now, before = self.now(), self._phase
        self._seconds[before] += now - self._since
        self._phase, self._since = phase, now
        return before

    def watch(
        self, names: Sequence[str], exchange: Generator[Any, Any, Any]
    ) -> Generator[Any, Any, Any]:
        """Return the exchange of a bucket, whose time is counted.  Its turns begin in the phase
        "other"; the time between them counts to the phase that it had."""
        own = self.buckets.setdefault(tuple(names), BucketTimes())
        around, reply, now = self.switch("other"), None, self._seconds
        while True:
            before = now.copy()
            try:
                request = exchange.send(reply)
            except StopIteration as stop:
                own.steps += 1
                return stop.value
            finally:
                self.switch(around)
                own.search += now["search"] - before["search"]
                own.encode += now["encode"] - before["encode"]
                own.add_up += now["add_up"] - before["add_up"]
                own.other += now["other"] - before["other"]
            left, waited = self._since, now["wait"]
            self._left_at = min(self._left_at, left)
            reply = yield request
            around = self.switch("other")
            own.wait += now["wait"] - waited
            own.under_way += self._since - left


def watched(names: Sequence[str], exchange: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Return the exchange of a bucket, counted by the clock that runs, if one does."""
    clock = _current.get()
    return exchange if clock is None else clock.watch(names, exchange)


def begin_phase(name: str) -> None:
    """Count what happens from now on as a phase, by the clock that runs, if one does."""
    if (clock := _current.get()) is not None:
        clock.switch(name)


def end_at_once(seconds: float) -> NoReturn:
    """End the process with status 1 after some seconds, without what would wait for other ranks."""
    for let_go in (lambda: sys.stdout.flush(), lambda: sys.stderr.flush(), logging.shutdown):
        with contextlib.suppress(Exception):  # they may be closed, or nobody may read them
            let_go()
    time.sleep(seconds)
    os._exit(1)
