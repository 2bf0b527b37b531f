"""Messages between workers and servers: their frame, and arrays and statistics in them.

All numbers are little-endian::

    offset  type    field
    0               the header: kind 5, what the message is (see :class:`MessageKind`), a flag,
                    the tag of the rules, which both ends must have in common, and the number of
                    parts
    16      i64     number: of the message, among those of its kind between a worker and a server
    24      i64[]   bytes of each part
    ...     u8[]    parts, each padded with zeros to 8 bytes
"""

from __future__ import annotations

import dataclasses
import enum
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.errors import PayloadError
from hvd_compress.wire import header
from hvd_compress.wire.header import START, Header, failing, opened

Arrays = dict[str, np.ndarray]

_FIXED = START + 8
_CAUSES = "the ranks do not run the same version with the same options of the parameter server"


class MessageKind(enum.IntEnum):
    """The kinds of messages."""

    # A gradient, from a worker; flag 1: its second part says which pieces have one
    PUSH = 1
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


def tag_of(rules: object) -> int:
    """Return 16 bits by which messages made by other rules are noticed."""
    return zlib.crc32(repr(rules).encode()) & 0xFFFF


def encode(message: ServerMessage, tag: int) -> np.ndarray:
    """Return the frame (1-D, uint8) of a message whose parts are 1-D, uint8."""
    sizes = [part.nbytes for part in message.parts]
    start = _FIXED + 8 * len(sizes)
    frame = np.zeros(start + sum(size + -size % 8 for size in sizes), np.uint8)
    frame[START:start].view("<i8")[:] = [message.number, *sizes]
    for part, size in zip(message.parts, sizes, strict=True):
        frame[start : start + size] = part
        start += size + -size % 8
    kind = header.Kind.SERVER
    return Header(kind, message.kind, message.flag, tag, len(sizes)).seal(frame)


def decode(frame: np.ndarray, tag: int, sender: str) -> ServerMessage:
    """Undo :func:`encode`; parts are views.

    Raises:
        PayloadError: the frame is damaged, or made by other rules.
    """

    fail = failing(sender, _CAUSES)
    _, kind, flag, theirs, count = opened(frame, header.Kind.SERVER, fail=fail)
    if frame.size < _FIXED or frame.size % 8:
        raise fail(f"{frame.size} bytes are no message")
    if theirs != tag:
        raise fail("it was made by other rules")
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


def bytes_of(x: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, for a part of a message."""
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def array_of(part: np.ndarray, like: np.ndarray, sender: str) -> np.ndarray:
    """Return an array of the shape and dtype of another from its bytes."""
    if part.nbytes != like.nbytes:
        raise PayloadError(
            f"bad payload from {sender}: {part.nbytes} bytes where {like.nbytes} were expected: "
            "the ranks' models or options differ"
        )
    return part.view(like.dtype).reshape(like.shape)


def arrays_of(parts: Iterable[np.ndarray], like: Mapping[str, np.ndarray], sender: str) -> Arrays:
    """Return copies of arrays of these names, shapes and dtypes from the parts of a message."""
    parts = list(parts)
    if len(parts) != len(like):
        raise PayloadError(
            f"bad payload from {sender}: {len(parts)} parts for {len(like)} parameters: the ranks' "
            "models differ"
        )
    return {
        name: array_of(part, x, sender).copy()
        for (name, x), part in zip(like.items(), parts, strict=True)
    }


@dataclasses.dataclass
class ServerStats:
    """The counts of a server.

    Attributes:
        updates: steps of the optimizer.
        pushes: gradients that arrived, of which ``dropped`` came too late, by worker, and
            ``non_finite`` were NaN or Inf; neither was used.  Of Leader SGD, ``non_finite`` are the
            workers that ended so, which are not in the mean.
        staleness: numbers of gradients by the updates between their parameters and their use.
        ahead: the most steps that a worker that went on was ahead of the slowest.
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
    ahead: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    lost: list[int] = dataclasses.field(default_factory=list)
    failed: list[int] = dataclasses.field(default_factory=list)
    returned: list[int] = dataclasses.field(default_factory=list)

    def left(self, worker: int, failed: bool) -> None:
        """Note that a worker has left, which may have been taken for lost."""
        if worker in self.lost:
            self.lost.remove(worker)
        if failed:
            self.failed.append(worker)

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
