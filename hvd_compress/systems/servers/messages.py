"""Messages between workers and servers, and the ends of their way that all kinds of servers have.

A frame, in which all numbers are little-endian::

    offset  type    field
    0               the header: kind 5, what the message is (see :class:`MessageKind`), a flag, and
                    the number of parts
    16      i64     number: of a gradient, among those of its worker; 0 in other messages
    24      i64[]   bytes of each part
    ...     u8[]    parts, each padded with zeros to 8 bytes
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.backends import numpy
from hvd_compress.errors import PayloadError
from hvd_compress.systems.base import Arrays
from hvd_compress.wire import header
from hvd_compress.wire.header import START, Header, failing, opened

_FIXED = START + 8
_CAUSES = "the ranks do not run the same version with the same options of the parameter server"


class MessageKind(enum.IntEnum):
    PUSH = 1  # a gradient, from a worker; an empty part: the parameter has none
    LEAVE = 2  # the worker sends no more; flag 1: because of an error
    PARAMETERS = 3  # the reply; flag 1: the gradient was taken
    END = 4  # all workers have left: the last parameters and the server's statistics
    BEAT = 5  # the server lives
    DONE = 6  # this process is about to end
    REPORT = 7  # a step was taken, with its loss, and a leader's parameters, if asked for
    # The reply; flags 1, 2: send your parameters, you lead your group, or all; 4, 8: here are those
    # of your group's leader, or of the leader of all
    LEADER = 8


class ServerMessage(NamedTuple):
    kind: MessageKind
    flag: int = 0
    number: int = 0
    parts: Sequence[np.ndarray] = ()


def encode(message: ServerMessage) -> np.ndarray:
    """Return the frame (1-D, uint8) of a message whose parts are 1-D, uint8."""
    sizes = [part.nbytes for part in message.parts]
    start = _FIXED + 8 * len(sizes)
    frame = np.zeros(start + sum(size + -size % 8 for size in sizes), np.uint8)
    frame[START:start].view("<i8")[:] = [message.number, *sizes]
    for part, size in zip(message.parts, sizes, strict=True):
        frame[start : start + size] = part
        start += size + -size % 8
    kind = header.Kind.SERVER
    return Header(kind, message.kind, message.flag, 0, len(sizes)).seal(frame)


def decode(frame: np.ndarray, sender: str) -> ServerMessage:
    """Undo :func:`encode`; parts are views."""

    fail = failing(sender, _CAUSES)
    _, kind, flag, _, count = opened(frame, header.Kind.SERVER, fail=fail)
    if frame.size < _FIXED or frame.size % 8:
        raise fail(f"{frame.size} bytes are no message")
    start = _FIXED + 8 * count
    if kind not in set(map(int, MessageKind)) or start > frame.size:
        raise fail(f"kind {kind} with {count} parts in {frame.size} bytes")
    number, *sizes = frame[START:start].view("<i8").tolist()
    if min(sizes, default=0) < 0 or start + sum(s + -s % 8 for s in sizes) != frame.size:
        raise fail(f"parts of {sizes} bytes in {frame.size}")
    parts = []
    for size in sizes:
        parts.append(frame[start : start + size])
        start += size + -size % 8
    return ServerMessage(MessageKind(kind), flag, number, parts)


def arrays_of(parts: Iterable[np.ndarray], like: Mapping[str, np.ndarray], sender: str) -> Arrays:
    """Return copies of arrays of these names, shapes and dtypes from the parts of a message."""
    parts = list(parts)
    if len(parts) != len(like):
        raise PayloadError(
            f"bad payload from {sender}: {len(parts)} parts for {len(like)} parameters: the ranks' "
            "models differ"
        )
    found = {}
    for (name, x), part in zip(like.items(), parts, strict=True):
        if part.nbytes != x.nbytes:
            raise PayloadError(
                f"bad payload from {sender}: {part.nbytes} bytes where {x.nbytes} were expected: "
                "the ranks' models or options differ"
            )
        found[name] = part.view(x.dtype).reshape(x.shape).copy()
    return found


@dataclasses.dataclass
class ServerStats:
    """The counts of a server.

    Attributes:
        updates: steps of the optimizer.
        pushes: gradients that arrived, by worker.  ``dropped`` of them came too late, and
            ``non_finite`` were NaN or Inf; neither was used.  In Leader SGD, ``non_finite`` are the
            workers that ended so, which are not in the mean.
        staleness: numbers of gradients by the updates between their parameters and their use.
        bytes_up, bytes_down: of all messages with gradients, and with parameters.
        lost, failed, returned: workers that were silent too long, that left with an error, and that
            were taken for lost and came back.

    >>> from collections import Counter
    >>> ServerStats(updates=4, staleness=Counter({0: 3, 2: 1})).mean_staleness  # in updates
    0.5
    """

    updates: int = 0
    pushes: int = 0
    dropped: Counter[int] = dataclasses.field(default_factory=Counter)
    non_finite: int = 0
    staleness: Counter[int] = dataclasses.field(default_factory=Counter)
    bytes_up: int = 0
    bytes_down: int = 0
    lost: list[int] = dataclasses.field(default_factory=list)
    failed: list[int] = dataclasses.field(default_factory=list)
    returned: list[int] = dataclasses.field(default_factory=list)

    def to_bytes(self) -> np.ndarray:
        return np.frombuffer(json.dumps(vars(self)).encode(), np.uint8)

    @classmethod
    def from_bytes(cls, raw: np.ndarray) -> ServerStats:
        found = cls(**json.loads(raw.tobytes()))
        for name in ("dropped", "staleness"):  # JSON's keys are texts
            counts = {int(key): count for key, count in getattr(found, name).items()}
            setattr(found, name, Counter(counts))
        return found

    @property
    def mean_staleness(self) -> float:
        total = self.staleness.total()
        return sum(tau * count for tau, count in self.staleness.items()) / total if total else 0.0


class Reply(NamedTuple):
    worker: int
    frame: np.ndarray


class ServerEnd(abc.ABC):
    """A server.  It talks to no network: it takes frames and returns frames.

    ``waiting`` has the workers that wait for a reply, and whether their gradient was taken.
    """

    def __init__(self, parameters: Mapping[str, np.ndarray], workers: Iterable[int]) -> None:
        self.parameters: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.active = set(workers)
        self.waiting: dict[int, bool] = {}
        self.stats = ServerStats()

    @property
    def is_over(self) -> bool:
        """Whether no worker is left."""
        return not self.active

    def receive(self, worker: int, frame: np.ndarray) -> list[Reply]:
        """Take a frame, and return the replies that are due now, to this worker or others."""
        message = decode(frame, f"worker {worker}")
        if worker in self.stats.lost:
            self.stats.lost.remove(worker)
        if message.kind is MessageKind.LEAVE:
            if message.flag:
                self.stats.failed.append(worker)
            return self._without(worker, message.parts)
        self.stats.bytes_up += frame.nbytes
        self.stats.pushes += 1
        is_back = worker not in self.active
        if is_back:
            self.stats.returned.append(worker)
            self.active.add(worker)
        return self._pushed(worker, message, is_back)

    def lose(self, worker: int) -> list[Reply]:
        """Do without a worker that was silent too long; if it comes back, it goes on from the
        parameters of then."""
        if worker in self.active:
            self.stats.lost.append(worker)
        return self._without(worker)

    def end(self) -> np.ndarray:
        """Return the last frame, with the last parameters and the statistics."""
        arrays = [numpy.to_bytes(x) for x in self.parameters.values()]
        return encode(ServerMessage(MessageKind.END, parts=[self.stats.to_bytes(), *arrays]))

    def _to(self, worker: int, message: ServerMessage) -> Reply:
        frame = encode(message)
        self.stats.bytes_down += frame.nbytes
        return Reply(worker, frame)

    def _without(self, worker: int, parts: Sequence[np.ndarray] = ()) -> list[Reply]:
        """Go on without a worker; ``parts`` came with the news that it leaves."""
        self.active.discard(worker)
        return []

    @abc.abstractmethod
    def _pushed(self, worker: int, message: ServerMessage, is_back: bool) -> list[Reply]:
        """Take what a worker has pushed, which was taken for lost if it ``is_back``."""


class WorkerEnd(abc.ABC):
    """A worker's end of the way to the server."""

    def __init__(self, parameters: Mapping[str, np.ndarray]) -> None:
        self.parameters: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.stats: ServerStats | None = None
        self.bytes_sent = self.bytes_received = 0

    @property
    def is_over(self) -> bool:
        """Whether the server has said that there is nothing more to do."""
        return self.stats is not None

    def leave(self, *, failed: bool = False) -> np.ndarray:
        """Return the frame that says that this worker sends no more."""
        return encode(ServerMessage(MessageKind.LEAVE, int(failed)))

    def receive(self, frame: np.ndarray) -> bool:
        """Take a frame of the server, and return whether it is the one that was waited for: a reply
        to a push, or the end."""
        message = decode(frame, "the server")
        if message.kind is MessageKind.BEAT:
            return False
        self.bytes_received += frame.nbytes
        if message.kind is MessageKind.END:
            head, *parts = message.parts
            self.stats = ServerStats.from_bytes(head)
            self.parameters = arrays_of(parts, self.parameters, "the server")
        else:
            self._replied(message)
        return True

    def _sent(self, message: ServerMessage) -> np.ndarray:
        frame = encode(message)
        self.bytes_sent += frame.nbytes
        return frame

    @abc.abstractmethod
    def _replied(self, message: ServerMessage) -> None:
        """Take the reply to a push."""
