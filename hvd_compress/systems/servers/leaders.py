"""Asynchronous Leader SGD (Teng et al., 2019): a server counts steps and names the leaders.

Workers take local steps at their own speed and report each loss, in a message of some bytes.  When
all together have taken workers * ``local_every`` steps, the server asks the worker of each group
with the smallest mean loss for its parameters, and the others of the group get them with the
replies to their next reports; after workers * ``global_every`` steps so does everybody with those
of the best of all.  So nobody waits for anybody, and fast workers take more steps.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hvd_compress.config import Configurable, check_between, check_whole, converted
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.systems.rounds.groups import Groups, checked_groups, groups_of
from hvd_compress.systems.servers.messages import Kind, Message, decode, encode
from hvd_compress.systems.servers.pieces import Arrays, is_finite
from hvd_compress.systems.servers.server import Reply
from hvd_compress.systems.servers.stats import ServerStats


class Role(enum.IntFlag):
    """Whom a worker leads, or whose leader is meant."""

    NONE = 0
    GROUP = 1
    ALL = 2


#: flags of replies: the roles that the worker is asked for, and, so many bits higher, the leaders
#: whose parameters come along
_NEWS = 2


@dataclasses.dataclass(frozen=True)
class LeaderRules(Configurable, kind="parameter server", name="leaders"):
    """Options of asynchronous Leader SGD, those of :class:`hvd_compress.systems.rounds.LeaderSGD`:
    with the leader z_j of the worker's group and the leader z of all, after each local step::

        x = x - l (x - z_j) - g (x - z)

    with l = ``local_pull`` when z_j has just arrived and ``local_drift`` / ``local_every`` in other
    steps, and g alike.  A leader is not pulled to itself, but the leader of a group is to that of
    all.

    Args:
        global_every, local_every: steps per worker, on average, between choices of the leader of
            all and of those of groups; the first is a multiple of the second.
        global_pull, local_pull, global_drift, local_drift: how far workers are pulled.  A leader to
            whom nobody is pulled sends nothing.
        groups: lists of workers, or the number of workers that make a group, in their order;
            ``None`` for the workers of each node.
        average_over: the number of minibatches whose mean loss is compared; ``None`` for
            ``local_every``.

    ``global_every=local_every, local_pull=0, local_drift=0`` is Leader SGD with one leader.
    """

    global_every: int = 16
    local_every: int = 4
    global_pull: float = 0.1
    local_pull: float = 0.1
    global_drift: float = 0.1
    local_drift: float = 0.1
    groups: Groups | int | None = dataclasses.field(
        default=None, metadata=converted(checked_groups)
    )
    average_over: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("local_every", self.local_every, 1)
        check_whole("global_every", self.global_every, 1)
        if self.global_every % self.local_every:
            raise ConfigError(
                f"global_every={self.global_every} must be a multiple of "
                f"local_every={self.local_every}"
            )
        for option in ("global_pull", "local_pull", "global_drift", "local_drift"):
            check_between(option, getattr(self, option), 0, 1)
        if self.average_over is None:
            object.__setattr__(self, "average_over", self.local_every)
        else:
            check_whole("average_over", self.average_over, 1)

    @property
    def tag(self) -> int:
        """See :class:`hvd_compress.systems.servers.Rules`."""
        return zlib.crc32(repr(self).encode()) & 0xFFFF

    @property
    def pulls(self) -> dict[Role, tuple[float, float]]:
        """How far workers are pulled to the leader in each role, when it is new, and later."""
        return {
            Role.GROUP: (self.local_pull, self.local_drift / self.local_every),
            Role.ALL: (self.global_pull, self.global_drift / self.global_every),
        }


class _Leader(NamedTuple):
    """A leader's parameters, and the number of this message."""

    number: int
    parts: list[np.ndarray]


class LeaderServer:
    """The server: it owns no parameters, but the last leaders'; see
    :class:`hvd_compress.systems.servers.Server` for the interface.

    Args:
        parameters: as workers have them in the beginning.
        workers: their numbers, from 0.
        rules: the same at all workers.
        nodes: the groups if ``rules.groups`` is ``None``; by default all workers are one.

    Attributes:
        leaders: the workers that were chosen to lead all, one after the other.
        group_leaders: those that were chosen to lead a group, at each choice.
        stats: ``updates`` are the leaders' parameters that arrived.
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        workers: Iterable[int],
        rules: LeaderRules,
        nodes: Groups | None = None,
    ) -> None:
        self._shapes: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.rules, self.active = rules, set(workers)
        self.waiting: dict[int, bool] = {}  # nobody ever waits
        self.stats = ServerStats()
        self.leaders: list[int] = []
        self.group_leaders: list[list[int]] = []
        everyone = len(self.active)
        self._groups = groups_of(rules.groups or nodes or everyone, everyone)
        self._count = self._choices = 0
        self._losses: dict[int, deque[float]] = {
            w: deque(maxlen=rules.average_over) for w in self.active
        }
        self._asked: dict[int, Role] = {}
        self._leader: dict[tuple[int, ...], _Leader] = {}  # of all: of the group ()
        self._has = dict.fromkeys([(w, role) for w in self.active for role in rules.pulls], 0)
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
        if parts and worker in self._asked:
            self.stats.updates += 1
            for role in _each(self._asked.pop(worker)):
                self._leader[self._led(worker, role)] = _Leader(
                    self.stats.updates, [part.copy() for part in parts]
                )
                self._has[worker, role] = self.stats.updates
        self._choose()
        return [self._reply(worker)]

    def lose(self, worker: int) -> list[Reply]:
        """Do without a worker that was silent too long; it may come back."""
        self.stats.lost.append(worker)
        return self._without(worker)

    def end(self) -> np.ndarray:
        """Return the last frame: the mean of the workers' last parameters, of those that left
        without an error, and the statistics.  Workers with a NaN or Inf are left out, and counted.
        If nobody is left, the last leader's parameters stand for the mean."""
        everyone = [own for _, own in sorted(self._last.items())]
        found = [own for own in everyone if is_finite(own)]
        self.stats.non_finite += len(everyone) - len(found)
        if not found and self._leader:
            last = max(self._leader.values(), key=lambda leader: leader.number)
            found = [_arrays(last.parts, self._shapes, "the leader")]
        found = found or everyone or [self._shapes]
        parts = [self.stats.to_bytes()]
        for name in self._shapes:
            total = found[0][name]
            for own in found[1:]:
                total = total + own[name]
            parts.append((total / len(found)).astype(total.dtype).reshape(-1).view(np.uint8))
        return encode(Message(Kind.END, parts=parts), self.rules.tag)

    def _led(self, worker: int, role: Role) -> tuple[int, ...]:
        """Return the group whose leader a worker is, or has, in a role."""
        if role is Role.ALL:
            return ()
        return next(group for group in self._groups if worker in group)

    def _without(self, worker: int) -> list[Reply]:
        self.active.discard(worker)
        self._asked.pop(worker, None)
        return []

    def _choose(self) -> None:
        """Name leaders if enough steps were taken, and the last ones have sent what they were asked
        for."""
        rules = self.rules
        if self._asked or self._count < len(self.active) * rules.local_every:
            return
        self._count, self._choices = 0, self._choices + 1
        if any(rules.pulls[Role.GROUP]):
            best = [self._best(self.active.intersection(group)) for group in self._groups]
            chosen = [worker for worker in best if worker is not None]
            self.group_leaders.append(chosen)
            for worker in chosen:
                if len(self._led(worker, Role.GROUP)) > 1:
                    self._asked[worker] = Role.GROUP
        is_due = self._choices % (rules.global_every // rules.local_every) == 0
        if is_due and any(rules.pulls[Role.ALL]) and (first := self._best(self.active)) is not None:
            self.leaders.append(first)
            self._asked[first] = self._asked.get(first, Role.NONE) | Role.ALL

    def _best(self, workers: Iterable[int]) -> int | None:
        """Return the worker with the smallest mean loss; of equal ones the first, and none whose
        loss is not finite."""
        means = {w: math.fsum(own) / len(own) for w, own in self._losses.items() if own}
        finite = [w for w in sorted(workers) if math.isfinite(means.get(w, math.nan))]
        return min(finite, key=means.__getitem__, default=None)

    def _reply(self, worker: int) -> Reply:
        asked, news = self._asked.get(worker, Role.NONE), Role.NONE
        found: dict[int, list[np.ndarray]] = {}  # one that leads group and all is sent once
        for role in self.rules.pulls:
            leader = self._leader.get(self._led(worker, role))
            if leader is not None and leader.number > self._has[worker, role]:
                self._has[worker, role] = leader.number
                found[leader.number] = leader.parts
                news |= role
        parts = [part for own in found.values() for part in own]
        flag = int(asked) | int(news) << _NEWS
        frame = encode(Message(Kind.LEADER, flag, parts=parts), self.rules.tag)
        self.stats.bytes_down += frame.nbytes
        return Reply(worker, frame)


class LeaderLink:
    """The worker's end.

    Attributes:
        answer: never any, since the server asks nothing but reports.
        leaders: the last leaders' parameters that this worker knows and is pulled to, by role.
        recovered: whether the last parameters had NaN or Inf, and were left for a leader's.
        stats: the server's statistics, when all is over; then ``parameters`` are the mean.
    """

    answer: np.ndarray | None = None

    def __init__(self, parameters: Mapping[str, np.ndarray], rules: LeaderRules) -> None:
        self._shapes: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.parameters = self._shapes
        self._rules = rules
        self.leaders: dict[Role, Arrays] = {}
        self.stats: ServerStats | None = None
        self._asked = self._news = Role.NONE
        self.recovered = False
        self.bytes_sent = self.bytes_received = 0

    @property
    def is_over(self) -> bool:
        return self.stats is not None

    def push(self, parameters: Mapping[str, np.ndarray], loss: float) -> np.ndarray:
        """Return the frame that reports a step; ``parameters`` travel only if this worker leads."""
        parts = [np.array([loss], "<f8").view(np.uint8)]
        if self._asked:
            parts += _parts(parameters, self._shapes)
            for role in _each(self._asked):
                self.leaders.pop(role, None)
            self._asked = Role.NONE
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
        self._asked = Role(message.flag & int(Role.GROUP | Role.ALL))
        self._news = Role(message.flag >> _NEWS)
        size, parts = len(self._shapes), list(message.parts)
        for role in _each(self._news):
            self.leaders[role] = _arrays(parts[:size], self._shapes, "the server")
            parts = parts[size:] or parts  # the last ones may be of both roles
        return True

    def pulled(self, parameters: Mapping[str, np.ndarray]) -> Arrays:
        """Return the parameters after the pulls to the leaders.  With NaN or Inf in them they are
        those of a leader that is new."""
        self.recovered = False
        if self._news and not is_finite(parameters):
            for role in _each(self._news):
                if is_finite(self.leaders[role]):
                    self.recovered = True
                    return {name: x.copy() for name, x in self.leaders[role].items()}
        found = dict(parameters)
        for role, (pull, drift) in self._rules.pulls.items():
            far = pull if role in self._news else drift
            if not far or role in self._asked or role not in self.leaders:
                continue
            for name, x in parameters.items():
                change = np.asarray(far, x.dtype) * (x - self.leaders[role][name])
                found[name] = found[name] - change
        return found


def _each(roles: Role) -> list[Role]:
    return [role for role in (Role.GROUP, Role.ALL) if role in roles]


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
