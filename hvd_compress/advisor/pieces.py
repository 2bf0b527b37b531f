"""The costs of a method by itself: its messages, which are counted, and the processor's time.

A method is run on gradients of a model's shapes by a few ranks, which are threads.  The time is the
processor's of the first of them, so neither the others nor other programs disturb it much.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.advisor.shapes import Shapes
from hvd_compress.engines.base import Engine
from hvd_compress.engines.joining import alone
from hvd_compress.engines.lockstep import reply_to
from hvd_compress.errors import NeedsTuning
from hvd_compress.methods import as_compressor
from hvd_compress.reduce import Reducer

#: of all models with a name, measured on one core of the machine that docs/performance.md is about
FILE = Path(__file__).with_suffix(".json")
#: far behind dense steps and warm-ups, which some methods begin with
_LATE = 250_000
#: random numbers that gradients repeat, since drawing takes longer than most methods
_POOL = 2**20


class Messages(NamedTuple):
    """The bytes that a rank hands over to exchanges of one kind in a step.

    Attributes:
        whole: bytes, whatever the number of ranks.
        shared: bytes of which each rank has its even part.
        exchanges: how many there are.
    """

    whole: int
    shared: int
    exchanges: int

    def nbytes(self, ranks: int) -> float:
        """Return the bytes of each rank, given the number of ranks."""
        return self.whole + self.shared / ranks


@dataclasses.dataclass(frozen=True)
class Piece:
    """The costs of a step of one method on the gradients of one model.

    Attributes:
        messages: by kind of exchange.
        buckets: how many parts of the gradient are sent while others are still being computed.
        before: processor seconds up to the first exchange of each bucket.
        after: processor seconds from there on, apart from
        each: those that every rank adds, for instance to read its message.

    >>> piece = kept("resnet50")["topk:density=0.01"]
    >>> round(piece.nbytes(ranks=4))  # where float32 has 102228128
    1281816
    """

    messages: Mapping[str, Messages]
    buckets: int
    before: float
    after: float
    each: float

    def processor(self, ranks: int) -> float:
        """Return the processor's seconds of a step."""
        return self.before + self.after + ranks * self.each

    def nbytes(self, ranks: int) -> float:
        """Return the bytes that a rank passes on in a step, given the number of ranks."""
        return sum(each.nbytes(ranks) for each in self.messages.values())


class _Exchange:
    """A place where the threads of all ranks exchange their requests for replies."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._requests: list[Any] = [None] * size
        self._replies: list[Any] = [None] * size

    def reply(self, request: Any, rank: int) -> Any:
        """Return the reply to a rank's request, when all ranks are there."""
        self._requests[rank] = request
        if self._barrier.wait() == 0:  # one thread answers all
            # Copies: a rank that goes on writes its next message where this one stood.
            if request.is_common:
                self._replies = [copy.deepcopy(reply_to(self._requests))] * len(self._requests)
            else:
                ranks = range(len(self._requests))
                self._replies = [copy.deepcopy(reply_to(self._requests, rank)) for rank in ranks]
        self._barrier.wait()
        return self._replies[rank]

    def fail(self) -> None:
        """Let nobody wait any more."""
        self._barrier.abort()


class _Engine(Engine):
    """An engine of one of several threads, which counts its messages and its processor's time."""

    rank = size = 0

    def __init__(self, rank: int, size: int, meeting: _Exchange) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting
        self._asking: dict[str, tuple[Generator[Any, Any, Any], Any]] = {}
        self._results: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        self.messages: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.buckets = 0
        self.meeting = self.reading = 0.0  # seconds of meetings, and of exchanges behind them

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        self._advance(name, alone(exchange), None)
        self.buckets += name in self._asking

    def _advance(self, name: str, exchange: Generator[Any, Any, Any], reply: Any) -> None:
        try:
            self._asking[name] = exchange, exchange.send(reply)
        except StopIteration as stop:
            self._results[name] = stop.value

    def finish(self) -> dict[str, Any]:
        while self._asking:
            name = next(iter(self._asking))
            exchange, request = self._asking.pop(name)
            began = time.thread_time()
            reply = self._meeting.reply(request, self.rank)
            kind = type(request).__name__.lower()
            sent, _ = request.count(reply, self.rank, self.size)
            self.messages[kind] += int(request.nbytes + sent)
            self.counts[kind] += 1
            met = time.thread_time()
            self._advance(name, exchange, reply)
            self.meeting += met - began
            self.reading += time.thread_time() - met
        results, self._results = self._results, {}
        return results

    def abandon(self) -> None:
        self._asking.clear()
        self._results.clear()


def measured(method: Any, shapes: Shapes, *, steps: int = 5, seed: int = 0) -> Piece:
    """Run a method on random gradients of these shapes, and return its costs.  This takes seconds
    for millions of parameters, and 20 times their memory.

    Args:
        method: a method, its name, or a string such as "topk:density=0.01".
        shapes: of the parameters by name.
        steps: of which the shortest counts, after two that prepare.
        seed: of the gradients.
    """
    before, two, of_two = _run(method, shapes, 2, steps, seed)
    _, three, of_three = _run(method, shapes, 3, steps, seed)
    messages = {}
    for kind, count in of_two.counts.items():
        shared = max(6 * (of_two.messages[kind] - of_three.messages[kind]), 0)
        messages[kind] = Messages(max(of_two.messages[kind] - shared // 2, 0), shared, count)
    # Only what is gathered grows with the ranks; elsewhere a difference is noise, to be multiplied.
    gathered = messages["gather"].whole if "gather" in messages else 0
    each = max(three - two, 0.0) if 2 * gathered > sum(of_two.messages.values()) else 0.0
    return Piece(messages, max(of_two.buckets, 1), before, max(two - 2 * each, 0.0), each)


def _run(
    method: Any, shapes: Shapes, size: int, steps: int, seed: int
) -> tuple[float, float, _Engine]:
    """Least seconds of rank 0 before the first exchange of each bucket and after it, and its
    engine, which has counted the last step."""
    meeting = _Exchange(size)
    engines = [_Engine(rank, size, meeting) for rank in range(size)]

    def train(rank: int) -> list[tuple[float, float]]:
        engine, random = engines[rank], np.random.default_rng((seed, rank))
        chosen = as_compressor(method)  # of its own, as a rank has it
        momentum = 0.9 * chosen.takes_momentum
        reducer = Reducer(chosen, engine, momentum=momentum, in_place=True)
        reducer.step, reducer.epoch, reducer.learning_rate = _LATE, _LATE, 0.1
        pool = random.standard_normal(_POOL, np.float32)
        gradients = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
        samples = []
        try:
            for _ in range(steps + 2):
                shift = int(random.integers(_POOL // 2))
                for x in gradients.values():
                    x[...] = np.resize(pool[shift:], x.shape)
                engine.begin()
                began = time.thread_time()
                reducer.reduce(gradients)
                whole = time.thread_time() - began - engine.meeting
                samples.append((whole - engine.reading, engine.reading))
        except BaseException:
            meeting.fail()
            raise
        return samples[2:]

    with warnings.catch_warnings(), ThreadPoolExecutor(size) as pool:
        warnings.simplefilter("ignore", NeedsTuning)  # nothing is trained here
        samples, *_ = pool.map(train, range(size))
    before, after = zip(*samples, strict=True)
    return min(before), min(after), engines[0]


def kept(model: str) -> dict[str, Piece]:
    """Return the pieces of a model by method, as measured when they were made.

    Args:
        model: one of ``MODELS``, which others are a ``KeyError`` for.
    """
    return {method: from_json(row) for method, row in json.loads(FILE.read_text())[model].items()}


def to_json(piece: Piece) -> dict[str, Any]:
    """Return what :func:`from_json` reads; seconds have four digits."""
    row = dataclasses.asdict(piece)
    seconds = {name: float(f"{row[name]:.4g}") for name in ("before", "after", "each")}
    return row | seconds


def from_json(row: Mapping[str, Any]) -> Piece:
    messages = {kind: Messages(*map(int, each)) for kind, each in row["messages"].items()}
    return Piece(**{**row, "messages": messages})
