"""What engines have in common, and the engine of a world of one.

An engine carries exchanges.  ``start`` submits the first round of some and never waits for other
ranks, so it may be called from autograd hooks; ``finish`` brings everything in and returns the
outcomes by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from hvd_compress.agreement import Terms
from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Alltoall,
    Array,
    Batch,
    Collective,
    Exchange,
    Gather,
    Outcome,
    Sum,
    Swap,
)
from hvd_compress.engines import lockstep
from hvd_compress.stats import Record

#: bytes of a message's length, where it travels
LENGTH = 8


class Engine(Protocol):
    #: making one is a collective, so its owners may compare at once what they are made for
    is_collective: bool

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def start(self, exchanges: Mapping[str, tuple[Exchange, Record]]) -> None:
        """Submit the first round of exchanges by name, each with the record that counts it."""

    def finish(self) -> dict[str, Outcome]:
        """Outcomes by name of everything that was started."""

    def abandon(self) -> None:
        """Forget what is under way, after a failure."""

    def agree(self, terms: Terms, like: Array) -> None:
        """Begin to compare ``terms`` over the ranks, before the first ``start`` of a step;
        ``finish`` raises ``MismatchError`` before anything else if they differ.  ``like`` is one of
        the arrays that will be exchanged."""


def itemsize(dtype: str) -> int:
    """Bytes of an element, by NumPy's names and "bfloat16"."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def payload_bytes(request: Collective) -> int:
    """What a rank hands over for a request, the length of a message of any size included."""
    if isinstance(request, Gather):
        size = backend_of(request.payload).size(request.payload)
        return size + (0 if request.equal_sizes else LENGTH)
    if isinstance(request, Swap):
        return 0 if request.partner is None else backend_of(request.payload).size(request.payload)
    if isinstance(request, Alltoall):
        return sum(backend_of(payload).size(payload) for payload in request.payloads)
    xp = backend_of(request.array)
    wire = (isinstance(request, Sum) and request.wire) or xp.dtype(request.array)
    return xp.size(request.array) * itemsize(wire)


class LocalEngine:
    """A world of one: every request is its own answer."""

    rank, size = 0, 1
    is_collective = False

    def __init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}

    def start(self, exchanges: Mapping[str, tuple[Exchange, Record]]) -> None:
        for name, (exchange, record) in exchanges.items():

            def count(request: Collective, reply: Any, record: Record = record) -> None:
                """What would be sent; alone, nothing is received."""
                record.bytes_sent += payload_bytes(request)

            self._outcomes[name] = lockstep.run([watched(exchange, count)])[0]

    def finish(self) -> dict[str, Outcome]:
        outcomes, self._outcomes = self._outcomes, {}
        return outcomes

    def abandon(self) -> None:
        self._outcomes.clear()

    def agree(self, terms: Terms, like: Array) -> None:
        pass


def watched(exchange: Exchange, note: Callable[[Collective, Any], None]) -> Exchange:
    """The same exchange; ``note(request, reply)`` learns of each request that meets others."""
    reply = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = yield request
        if not isinstance(request, Batch):
            note(request, reply)
