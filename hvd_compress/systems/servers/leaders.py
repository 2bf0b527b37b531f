"""Asynchronous Leader SGD (Teng et al., 2019): a server counts steps and names the leaders.

Workers take local steps at their own speed and report each loss, in a message of some bytes.  After
workers * ``local_every`` steps of all together, the server asks the worker of each group with the
smallest mean loss for its parameters.  The others of the group get them with the replies to their
next reports.  After workers * ``global_every`` steps all workers get the parameters of the best of
all.  So nobody waits for anybody, and fast workers take more steps.

Options are those of :class:`hvd_compress.systems.rounds.LeaderSGD`, whose ranks are workers here;
periods are steps per worker, on average.  A worker is pulled after its local step, in full to a
leader that has just arrived.  A leader to whom nobody is pulled sends nothing, and a leader of a
group is pulled to that of all.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.backends import numpy
from hvd_compress.systems.base import Arrays, Groups, all_finite, groups_of
from hvd_compress.systems.leader_sgd import LeaderSGD
from hvd_compress.systems.servers.messages import (
    MessageKind,
    Reply,
    ServerEnd,
    ServerMessage,
    WorkerEnd,
    arrays_of,
    encode,
)


class Role(enum.IntFlag):
    """The workers that a worker leads, or whose leader is meant."""

    NONE = 0
    GROUP = 1
    ALL = 2


#: flags of replies: the roles that the worker is asked for, and, so many bits higher, the leaders
#: whose parameters come along
_NEWS = 2


def pulls_of(method: LeaderSGD) -> dict[Role, tuple[float, float]]:
    """Return how far workers are pulled to the leader in each role, when it is new, and later."""
    return {Role.GROUP: method.pulls["group_leader"], Role.ALL: method.pulls["leader"]}


class _Leader(NamedTuple):
    """A leader's parameters, and the number of this message."""

    number: int
    parts: list[np.ndarray]


class LeaderServer(ServerEnd):
    """The server: it owns no parameters, but the last leaders'.

    Args:
        parameters: as workers have them in the beginning.
        workers: their numbers, from 0.
        method: the options, the same at all workers.
        nodes: the groups if ``method.groups`` is ``None``; by default all workers are one.

    Attributes:
        leaders: the workers that were chosen to lead all, one after the other.
        group_leaders: those that were chosen to lead a group, at each choice.
        stats: ``updates`` are the leaders' parameters that arrived.
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        workers: Iterable[int],
        method: LeaderSGD,
        nodes: Groups | None = None,
    ) -> None:
        super().__init__(parameters, workers)
        self.method, self._pulls = method, pulls_of(method)
        self.leaders: list[int] = []
        self.group_leaders: list[list[int]] = []
        everyone = len(self.active)
        if method.groups or nodes is None:
            nodes = groups_of(method.groups or everyone, everyone)
        self._groups = nodes
        self._count = self._choices = 0
        self._losses: dict[int, deque[float]] = {
            w: deque(maxlen=method.loss_window) for w in self.active
        }
        self._asked: dict[int, Role] = {}
        self._leader: dict[tuple[int, ...], _Leader] = {}  # of all: of the group ()
        self._has = dict.fromkeys([(w, role) for w in self.active for role in self._pulls], 0)
        self._last: dict[int, Arrays] = {}  # parameters of workers that have left

    def _pushed(self, worker: int, message: ServerMessage, is_back: bool) -> list[Reply]:
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

    def end(self) -> np.ndarray:
        """Return the last frame, with the mean of the last parameters of the workers that left
        without an error.  Workers with a NaN or Inf are left out.  If nobody is left, the last
        leader's parameters stand for the mean."""
        everyone = [own for _, own in sorted(self._last.items())]
        found = [own for own in everyone if all_finite(own)]
        if not found and self._leader:
            last = max(self._leader.values(), key=lambda leader: leader.number)
            found = [arrays_of(last.parts, self.parameters, "the leader")]
        found = found or everyone or [self.parameters]
        first, *others = found
        totals = {name: sum((own[name] for own in others), x) for name, x in first.items()}
        self.parameters = {name: (x / len(found)).astype(x.dtype) for name, x in totals.items()}
        return super().end()

    def _led(self, worker: int, role: Role) -> tuple[int, ...]:
        """Return the group whose leader a worker is, or has, in a role."""
        if role is Role.ALL:
            return ()
        return next(group for group in self._groups if worker in group)

    def _without(self, worker: int, parts: Sequence[np.ndarray] = ()) -> list[Reply]:
        if parts:
            own = arrays_of(parts, self.parameters, f"worker {worker}")
            self.stats.non_finite += not all_finite(own)
            self._last[worker] = own
        self._asked.pop(worker, None)
        return super()._without(worker)

    def _choose(self) -> None:
        """Name leaders if enough steps were taken, and the last ones have sent what they were asked
        for."""
        method = self.method
        if self._asked or self._count < len(self.active) * method.local_every:
            return
        self._count, self._choices = 0, self._choices + 1
        if any(self._pulls[Role.GROUP]):
            best = [self._best(self.active.intersection(group)) for group in self._groups]
            chosen = [worker for worker in best if worker is not None]
            self.group_leaders.append(chosen)
            for worker in chosen:
                if len(self._led(worker, Role.GROUP)) > 1:
                    self._asked[worker] = Role.GROUP
        is_due = self._choices % (method.global_every // method.local_every) == 0
        if is_due and any(self._pulls[Role.ALL]) and (first := self._best(self.active)) is not None:
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
        for role in self._pulls:
            leader = self._leader.get(self._led(worker, role))
            if leader is not None and leader.number > self._has[worker, role]:
                self._has[worker, role] = leader.number
                found[leader.number] = leader.parts
                news |= role
        parts = [part for own in found.values() for part in own]
        flag = int(asked) | int(news) << _NEWS
        return self._to(worker, ServerMessage(MessageKind.LEADER, flag, parts=parts))


class LeaderLink(WorkerEnd):
    """The worker's end.

    Attributes:
        leaders: the last leaders' parameters that this worker knows and is pulled to, by role.
        recovered: whether the last parameters had NaN or Inf, and were left for a leader's.
    """

    def __init__(self, parameters: Mapping[str, np.ndarray], method: LeaderSGD) -> None:
        super().__init__(parameters)
        self._pulls = pulls_of(method)
        self.leaders: dict[Role, Arrays] = {}
        self._asked = self._news = Role.NONE
        self.recovered = False

    def push(self, parameters: Mapping[str, np.ndarray], loss: float) -> np.ndarray:
        """Return the frame that reports a step; ``parameters`` travel only if this worker leads."""
        parts = [np.array([loss], "<f8").view(np.uint8)]
        if self._asked:
            parts += [numpy.to_bytes(parameters[name]) for name in self.parameters]
            for role in _each(self._asked):
                self.leaders.pop(role, None)
            self._asked = Role.NONE
        self.parameters = {name: np.array(parameters[name]) for name in self.parameters}
        return self._sent(ServerMessage(MessageKind.REPORT, parts=parts))

    def leave(self, *, failed: bool = False) -> np.ndarray:
        parts = [] if failed else [numpy.to_bytes(x) for x in self.parameters.values()]
        return encode(ServerMessage(MessageKind.LEAVE, int(failed), parts=parts))

    def _replied(self, message: ServerMessage) -> None:
        self._asked = Role(message.flag & int(Role.GROUP | Role.ALL))
        self._news = Role(message.flag >> _NEWS)
        size, parts = len(self.parameters), list(message.parts)
        for role in _each(self._news):
            self.leaders[role] = arrays_of(parts[:size], self.parameters, "the server")
            parts = parts[size:] or parts  # the last ones may be of both roles

    def pull(self) -> None:
        """Pull the parameters to the leaders.  With NaN or Inf in them they become those of a
        leader that is new."""
        self.recovered = False
        if self._news and not all_finite(self.parameters):
            for role in _each(self._news):
                if all_finite(self.leaders[role]):
                    self.recovered = True
                    self.parameters = {name: x.copy() for name, x in self.leaders[role].items()}
                    return
        far = {
            role: pull if role in self._news else drift
            for role, (pull, drift) in self._pulls.items()
            if role in self.leaders and role not in self._asked
        }
        for name, x in self.parameters.items():
            for role, share in far.items():
                if share:
                    change = np.asarray(share, x.dtype) * (x - self.leaders[role][name])
                    self.parameters[name] = self.parameters[name] - change


def _each(roles: Role) -> list[Role]:
    return [role for role in (Role.GROUP, Role.ALL) if role in roles]
