"""Asynchronous Leader SGD (Teng et al., 2019): a server counts steps and names the leader.

Workers take local steps at their own speed and report each loss, in a message of some bytes.  When
all together have taken workers * ``local_every`` steps, the server asks the worker with the
smallest mean loss for its parameters, and the others get them with the replies to their next
reports.  So nobody waits for anybody, and fast workers take more steps.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

from hvd_compress.config import Configurable
from hvd_compress.errors import PayloadError
from hvd_compress.parameter_server.messages import Kind, Message, decode, encode
from hvd_compress.parameter_server.pieces import Arrays
from hvd_compress.parameter_server.server import Reply, ServerStats
from hvd_compress.training.base import check_between, check_whole


@dataclasses.dataclass(frozen=True)
class LeaderRules(Configurable, kind="parameter server", name="leaders"):
    """Options of asynchronous Leader SGD with one leader z::

        x = x - l (x - z)      after each local step

    with l = ``pull`` when z has just arrived and ``drift`` / ``local_every`` in other steps.  The
    leader itself is not pulled until another one leads.

    Args:
        local_every: steps per worker, on average, between choices of the leader.
        pull, drift: how far workers are pulled.
        average_over: the number of minibatches whose mean loss is compared; ``None`` for
            ``local_every``.
    """

    local_every: int = 4
    pull: float = 0.1
    drift: float = 0.1
    average_over: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("local_every", self.local_every, 1)
        check_between("pull", self.pull, 0, 1)
        check_between("drift", self.drift, 0, 1)
        if self.average_over is None:
            object.__setattr__(self, "average_over", self.local_every)
        else:
            check_whole("average_over", self.average_over, 1)

    @property
    def tag(self) -> int:
        """See :class:`hvd_compress.parameter_server.Rules`."""
        return zlib.crc32(repr(self).encode()) & 0xFFFF


class LeaderServer:
    """The server: it owns no parameters, but the last leader's; see
    :class:`hvd_compress.parameter_server.Server` for the interface.

    Attributes:
        leaders: the workers that were chosen, one after the other.
        stats: ``updates`` are the leaders' parameters that arrived.
    """

    def __init__(
        self, parameters: Mapping[str, np.ndarray], workers: Iterable[int], rules: LeaderRules
    ) -> None:
        self._shapes: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.rules, self.active = rules, set(workers)
        self.waiting: dict[int, bool] = {}  # nobody ever waits
        self.stats = ServerStats()
        self.leaders: list[int] = []
        self._count = 0
        self._losses: dict[int, deque[float]] = {
            w: deque(maxlen=rules.average_over) for w in self.active
        }
        self._asked: int | None = None
        self._leader: tuple[int, int, list[np.ndarray]] | None = None  # round, worker, parameters
        self._has = dict.fromkeys(self.active, 0)  # the round whose leader a worker knows
        self._last: dict[int, Arrays] = {}  # parameters of workers that have left

    @property
    def is_over(self) -> bool:
        return not self.active

    def receive(self, worker: int, frame: np.ndarray) -> list[Reply]:
        """Take a frame, and return the replies."""
        message = decode(frame, self.rules.tag, f"worker {worker}")
        if message.kind is Kind.LEAVE:
            self.stats.left(worker, bool(message.flag))
            if message.parts:
                self._last[worker] = _arrays(message.parts, self._shapes, f"worker {worker}")
            return self._without(worker)
        self.stats.bytes_up += frame.nbytes
        self.stats.pushes += 1
        if worker not in self.active:  # it was taken for lost
            self.stats.lost.remove(worker)
            self.stats.returned.append(worker)
            self.active.add(worker)
        head, *parts = message.parts
        self._losses[worker].append(float(head.view("<f8")[0]))
        self._count += 1
        if parts and self._asked == worker:
            self._asked = None
            self.stats.updates += 1
            self._leader = self.stats.updates, worker, [part.copy() for part in parts]
            self._has[worker] = self.stats.updates
        self._choose()
        return [self._reply(worker)]

    def lose(self, worker: int) -> list[Reply]:
        """Do without a worker that was silent too long; it may come back."""
        self.stats.lost.append(worker)
        return self._without(worker)

    def end(self) -> np.ndarray:
        """Return the last frame: the mean of the workers' last parameters, of those that left
        without an error, and the statistics.  If there are none, the last leader's stand for it."""
        found = [own for _, own in sorted(self._last.items())]
        if not found and self._leader is not None:
            found = [_arrays(self._leader[2], self._shapes, "the leader")]
        found = found or [self._shapes]
        parts = [self.stats.to_bytes()]
        for name in self._shapes:
            total = found[0][name]
            for own in found[1:]:
                total = total + own[name]
            parts.append((total / len(found)).astype(total.dtype).reshape(-1).view(np.uint8))
        return encode(Message(Kind.END, parts=parts), self.rules.tag)

    def _without(self, worker: int) -> list[Reply]:
        self.active.discard(worker)
        if self._asked == worker:
            self._asked = None
        return []

    def _choose(self) -> None:
        """Name a leader if enough steps were taken; of equal losses the first worker's is the
        smallest, and one that is not finite does not lead."""
        if self._asked is not None or self._count < len(self.active) * self.rules.local_every:
            return
        means = {w: math.fsum(own) / len(own) for w, own in self._losses.items() if own}
        finite = [w for w in sorted(self.active) if math.isfinite(means.get(w, math.nan))]
        self._count = 0
        if finite:
            self._asked = min(finite, key=means.__getitem__)
            self.leaders.append(self._asked)

    def _reply(self, worker: int) -> Reply:
        parts: list[np.ndarray] = []
        if self._leader is not None and self._leader[0] > self._has[worker]:
            self._has[worker], _, parts = self._leader
        flag = int(self._asked == worker)
        frame = encode(Message(Kind.LEADER, flag, self._has[worker], parts), self.rules.tag)
        self.stats.bytes_down += frame.nbytes
        return Reply(worker, frame)


class LeaderLink:
    """The worker's end.

    Attributes:
        answer: never any, since the server asks nothing but reports.
        leader: the last leader's parameters that this worker knows; ``None`` if there is none, or
            it leads itself.
        stats: the server's statistics, when all is over; then ``parameters`` are the mean.
    """

    answer: np.ndarray | None = None

    def __init__(self, parameters: Mapping[str, np.ndarray], rules: LeaderRules) -> None:
        self._shapes: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.parameters = self._shapes
        self._rules = rules
        self.leader: Arrays | None = None
        self.stats: ServerStats | None = None
        self._is_new = self._is_asked = False
        self.bytes_sent = self.bytes_received = 0

    @property
    def is_over(self) -> bool:
        return self.stats is not None

    def push(self, parameters: Mapping[str, np.ndarray], loss: float) -> np.ndarray:
        """Return the frame that reports a step; ``parameters`` travel only if this worker leads."""
        parts = [np.array([loss], "<f8").view(np.uint8)]
        if self._is_asked:
            parts += _parts(parameters, self._shapes)
            self._is_asked, self.leader = False, None
        frame = encode(Message(Kind.REPORT, parts=parts), self._rules.tag)
        self.parameters = {name: np.array(parameters[name]) for name in self._shapes}
        self.bytes_sent += frame.nbytes
        return frame

    def leave(self, *, failed: bool = False) -> np.ndarray:
        """Return the last frame, with the parameters of the last report."""
        parts = [] if failed else _parts(self.parameters, self._shapes)
        return encode(Message(Kind.LEAVE, int(failed), parts=parts), self._rules.tag)

    def receive(self, frame: np.ndarray) -> bool:
        """Take a frame of the server; return whether it is the one that was waited for."""
        message = decode(frame, self._rules.tag, "the server")
        if message.kind is Kind.BEAT:
            return False
        self.bytes_received += frame.nbytes
        if message.kind is Kind.END:
            head, *parts = message.parts
            self.stats = ServerStats.from_bytes(head)
            self.parameters = _arrays(parts, self._shapes, "the server")
            return True
        self._is_asked, self._is_new = bool(message.flag), bool(message.parts)
        if message.parts:
            self.leader = _arrays(message.parts, self._shapes, "the server")
        return True

    def pulled(self, parameters: Mapping[str, np.ndarray]) -> Arrays:
        """Return the parameters after the pull to the leader."""
        if self.leader is None or self._is_asked:
            return dict(parameters)
        rules = self._rules
        far = rules.pull if self._is_new else rules.drift / rules.local_every
        return {
            name: x - np.asarray(far, x.dtype) * (x - self.leader[name])
            for name, x in parameters.items()
        }


def _parts(arrays: Mapping[str, np.ndarray], shapes: Arrays) -> list[np.ndarray]:
    return [np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) for name in shapes]


def _arrays(parts: Iterable[np.ndarray], shapes: Arrays, sender: str) -> Arrays:
    parts = list(parts)
    if [part.nbytes for part in parts] != [x.nbytes for x in shapes.values()]:
        raise PayloadError(f"bad payload from {sender}: parameters of another model")
    return {
        name: part.view(x.dtype).reshape(x.shape).copy()
        for (name, x), part in zip(shapes.items(), parts, strict=True)
    }
