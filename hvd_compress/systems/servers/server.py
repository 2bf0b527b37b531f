"""The two ends of a parameter server: which gradients count, and which workers may go on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from hvd_compress.base import State
from hvd_compress.errors import ConfigError, PayloadError
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.base import Arrays, all_finite
from hvd_compress.systems.servers.coding import coder_of
from hvd_compress.systems.servers.messages import (
    MessageKind,
    Reply,
    ServerEnd,
    ServerMessage,
    WorkerEnd,
    arrays_of,
    bytes_of,
)
from hvd_compress.systems.servers.optimizers import ArrayOptimizer, ServerOptimizer
from hvd_compress.systems.servers.rules import Rules


class Server(ServerEnd):
    """The server, which owns the parameters.

    Args:
        parameters: by name, float32 or float64; copied.
        optimizer: steps on them; or a formula to step by.
        workers: the numbers of the workers, all of which know ``parameters``.
        rules: the same at all workers.
        seed: of random numbers that servers and workers share.
        momentum, nesterov: for compressions that take momentum over, so that ``optimizer`` must
            have none.

    Attributes:
        parameters: those of now.
        active: the workers that are expected to push.
        waiting: those of them that wait for a reply.
        stats: a :class:`ServerStats`.

    >>> x = {"w": np.ones(3)}
    >>> server, link = Server(x, SGD(lr=0.1), workers=[0], rules=Rules()), Link(x, 0, Rules())
    >>> [reply] = server.receive(0, link.push({"w": np.ones(3)}))
    >>> reply.worker, server.parameters["w"]
    (0, array([0.9, 0.9, 0.9]))
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        optimizer: Formula | ServerOptimizer,
        workers: Iterable[int],
        rules: Rules,
        *,
        seed: int = 0,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(parameters, workers, rules)
        self.rules = rules
        self.optimizer: ServerOptimizer = (
            ArrayOptimizer(optimizer) if isinstance(optimizer, Formula) else optimizer
        )
        self._version = 0
        self._base = dict.fromkeys(self.active, 0)  # the version that a worker has
        self._arrived: dict[int, tuple[Arrays | None, list[float]]] = {}  # of this step
        self._coders = {w: coder_of(rules, w, seed, momentum, nesterov) for w in self.active}

    # -- what happens -------------------------------------------------------------------------

    def _pushed(self, worker: int, message: ServerMessage) -> list[Reply]:
        sender = f"worker {worker}"
        parts = iter(message.parts)
        epoch, *rates = next(parts).view("<f8").tolist()
        names = self._named(next(parts, None) if message.flag else None, sender)
        if self.rules.mode == "sync" and self._base[worker] != self._version:
            self.stats.dropped[worker] += 1  # it is of a step that is over
            self.waiting[worker] = False
            return self._due()
        like = {name: self.parameters[name] for name in names}
        read = self._coders[worker].decode(parts, like, message.number, epoch, sender)
        found = read if all_finite(read) else None
        self.stats.non_finite += found is None
        self.waiting[worker] = found is not None
        if self.rules.mode == "sync":
            self._arrived[worker] = found, rates
        else:
            self._apply(worker, found, rates)
        return self._due()

    def _named(self, mask: np.ndarray | None, sender: str) -> list[str]:
        """Return the names of the parameters of which a message has a gradient."""
        names = list(self.parameters)
        if mask is None:
            return names
        if mask.size != len(names):
            raise PayloadError(f"bad payload from {sender}: {mask.size} marks for {names}")
        return [name for name, is_there in zip(names, mask, strict=True) if is_there]

    def _without(self, worker: int) -> list[Reply]:
        super()._without(worker)
        self.waiting.pop(worker, None)
        self._arrived.pop(worker, None)
        return self._due()

    def _returned(self, worker: int, message: ServerMessage) -> list[Reply]:
        self.stats.dropped[worker] += 1
        self.active.add(worker)
        return [self._reply(worker, False)]

    # -- gradients ----------------------------------------------------------------------------

    def _step_together(self) -> None:
        """Step along the mean of what has arrived, added in the order of the workers.  A gradient
        that only some have counts as zero on the others; without any there is no step."""
        found = {w: own for w, (own, _) in sorted(self._arrived.items()) if own is not None}
        if found:
            self.stats.staleness[0] += len(found)
            mean = {}
            for name in self.parameters:
                if parts := [own[name] for own in found.values() if name in own]:
                    mean[name] = sum(parts[1:], parts[0]) / len(found)
            self.optimizer.step(self.parameters, mean, self._arrived[next(iter(found))][1])
            self.stats.updates += 1
        self._arrived.clear()
        self._version += 1

    def _apply(self, worker: int, gradients: Arrays | None, rates: list[float]) -> None:
        """Step along one gradient."""
        if gradients is None:
            return
        self.stats.staleness[self._version - self._base[worker]] += 1
        self.optimizer.step(self.parameters, gradients, rates)
        self.stats.updates += 1
        self._version += 1

    # -- replies ------------------------------------------------------------------------------

    def _due(self) -> list[Reply]:
        """Step if that is due, and return the replies to all who may go on."""
        enough = max(1, len(self.active) - self.rules.backup)
        if self.rules.mode == "sync" and len(self._arrived) >= enough:
            self._step_together()
        free = [w for w in self.waiting if w not in self._arrived]
        return [self._reply(w, self.waiting.pop(w)) for w in sorted(free)]

    def _reply(self, worker: int, taken: bool) -> Reply:
        self._base[worker] = self._version
        parts = [bytes_of(x) for x in self.parameters.values()]
        return self._to(worker, ServerMessage(MessageKind.PARAMETERS, int(taken), parts=parts))


class Link(WorkerEnd):
    """A worker's end of the way to the server.

    Args:
        parameters: those that the server owns, as it has them in the beginning.
        worker: the worker's number.
        rules, seed, momentum, nesterov: those of the server.

    Attributes:
        parameters: as this worker knows them.
        states: the states of the compression, residuals for instance.
        taken: whether the last gradient was used; if it was not, the states are as before it.
        stats: the server's statistics, when all is over.
        bytes_sent, bytes_received: of all messages.

    >>> x = {"w": np.ones(3)}
    >>> server, link = Server(x, SGD(lr=0.1), workers=[0], rules=Rules()), Link(x, 0, Rules())
    >>> [reply] = server.receive(0, link.push({"w": np.ones(3)}))
    >>> link.receive(reply.frame), link.parameters["w"]
    (True, array([0.9, 0.9, 0.9]))
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        worker: int,
        rules: Rules,
        *,
        seed: int = 0,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(parameters, rules)
        self.states: dict[str, State] = {}
        self.taken = True
        self._coder = coder_of(rules, worker, seed, momentum, nesterov)
        self._pending: dict[str, State] | None = None
        self._pushes = 0

    def push(
        self,
        gradients: Mapping[str, np.ndarray],
        rates: Sequence[float] = (),
        epoch: float | None = None,
    ) -> np.ndarray:
        """Return the frame of gradients by the names of the parameters; one that is left out has
        no gradient.

        Args:
            rates: the learning rate of each group of parameters; none for the server's own.
            epoch: for compressions with schedules by epoch.
        """
        if self._pending is not None:
            raise ConfigError("a gradient is under way: wait for the reply before the next one")
        if not gradients.keys() <= self.parameters.keys():
            raise ConfigError(f"gradients of {sorted(gradients)}, not {sorted(self.parameters)}")
        known = math.nan if epoch is None else float(epoch)
        ordered = {name: gradients[name] for name in self.parameters if name in gradients}
        parts = [np.array([known, *rates]).view(np.uint8)]
        if is_partial := len(ordered) < len(self.parameters):
            parts.append(np.array([name in ordered for name in self.parameters], np.uint8))
        encoded = self._coder.encode(ordered, self.states, self._pushes, known)
        self._pending = {**self.states, **encoded.states}
        parts += encoded.parts
        self._pushes += 1
        return self._sent(ServerMessage(MessageKind.PUSH, int(is_partial), self._pushes - 1, parts))

    def _replied(self, message: ServerMessage) -> None:
        self.parameters = arrays_of(message.parts, self.parameters, "the server")
        self.taken = bool(message.flag)
        if self._pending is not None and self.taken:
            self.states = self._pending
        self._pending = None
