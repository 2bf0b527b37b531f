"""The server's end: whose gradient counts, and who may go on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from hvd_compress.errors import PayloadError
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.servers.coding import coders
from hvd_compress.systems.servers.messages import Kind, Message, decode, encode, tag_of
from hvd_compress.systems.servers.optimizers import ServerOptimizer, as_server_optimizer
from hvd_compress.systems.servers.pieces import Arrays, added, bytes_of, is_finite
from hvd_compress.systems.servers.rules import Rules
from hvd_compress.systems.servers.stats import ServerStats

_DECAY, _EPS = 0.95, 1e-7  # of the adaptive compensation


class Reply(NamedTuple):
    """A frame to a worker."""

    worker: int
    frame: np.ndarray


class Server:
    """One server, with the parameters that it owns.  It talks to no network: it takes frames and
    returns frames.

    Args:
        parameters: its pieces by name, float32 or float64; copied.
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
        self.parameters: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.optimizer, self.rules = as_server_optimizer(optimizer), rules
        self.active = set(workers)
        self.waiting: dict[int, bool] = {}  # whether the gradient was taken
        self.stats = ServerStats()
        self._version = 0
        self._base = dict.fromkeys(self.active, 0)  # the version that a worker has
        self._clock = dict.fromkeys(self.active, 0)  # its steps
        self._epoch = math.nan
        self._arrived: dict[int, tuple[Arrays | None, list[float]]] = {}  # of this step
        self._known = {w: self._copies() for w in self.active} if rules.needs_copies else {}
        self._squares = {name: np.zeros_like(x) for name, x in self.parameters.items()}
        self._replies = Counter[int]()
        self._coders = {w: coders(rules, w, seed, momentum, nesterov) for w in self.active}

    # -- what happens -------------------------------------------------------------------------

    def receive(self, worker: int, frame: np.ndarray) -> list[Reply]:
        """Take a frame, and return the replies that are due now, to this worker or others.

        Raises:
            PayloadError: the frame is damaged, or of other rules.
        """
        sender = f"worker {worker}"
        message = decode(frame, tag_of(self.rules), sender)
        if message.kind is Kind.LEAVE:
            self.stats.left(worker, bool(message.flag))
            return self._without(worker)
        self.stats.bytes_up += frame.nbytes
        self.stats.pushes += 1
        if worker not in self.active:
            return self._returned(worker)
        parts = iter(message.parts)
        self._epoch, *rates = next(parts).view("<f8").tolist()
        names = self._named(next(parts, None) if message.flag else None, sender)
        if self.rules.mode == "sync" and self._base[worker] != self._version:
            self.stats.dropped[worker] += 1  # it is of a step that is over
            self.waiting[worker] = False
            return self._due()
        like = {name: self.parameters[name] for name in names}
        up, _ = self._coders[worker]
        read = up.decode(parts, like, message.number, self._epoch, sender)
        found = read if is_finite(read) else None
        self.stats.non_finite += found is None
        self.waiting[worker] = found is not None
        if self.rules.mode == "sync":
            self._arrived[worker] = found, rates
        else:
            self._apply(worker, found, rates)
        return self._due()

    def _named(self, mask: np.ndarray | None, sender: str) -> list[str]:
        """Return the names of the pieces of which a message has a gradient."""
        names = list(self.parameters)
        if mask is None:
            return names
        if mask.size != len(names):
            raise PayloadError(f"bad payload from {sender}: {mask.size} marks for {names}")
        return [name for name, is_there in zip(names, mask, strict=True) if is_there]

    def lose(self, worker: int) -> list[Reply]:
        """Do without a worker that was silent too long; if it comes back, it goes on from the
        parameters of then."""
        if worker in self.active:
            self.stats.lost.append(worker)
        return self._without(worker)

    @property
    def is_over(self) -> bool:
        """Whether no worker is left."""
        return not self.active

    def end(self) -> np.ndarray:
        """Return the last frame, with the parameters as they are and the statistics."""
        parts = [bytes_of(x) for x in self.parameters.values()]
        return encode(Message(Kind.END, parts=[self.stats.to_bytes(), *parts]), tag_of(self.rules))

    def _without(self, worker: int) -> list[Reply]:
        self.active.discard(worker)
        self.waiting.pop(worker, None)
        self._arrived.pop(worker, None)
        return self._due()

    def _returned(self, worker: int) -> list[Reply]:
        if worker in self.stats.lost:
            self.stats.lost.remove(worker)
        self.stats.returned.append(worker)
        self.stats.dropped[worker] += 1
        self._clock[worker] = min((self._clock[w] for w in self.active), default=0)
        self.active.add(worker)
        return [self._reply(worker, False)]

    # -- gradients ----------------------------------------------------------------------------

    def _step_together(self) -> None:
        """Step along the mean of what has arrived, added in the order of the workers.  Where some
        have no gradient it counts as zero, and where nobody has one there is no step."""
        found = {w: own for w, (own, _) in sorted(self._arrived.items()) if own is not None}
        if found:
            self.stats.staleness[0] += len(found)
            mean = {}
            for name in self.parameters:
                if parts := [own[name] for own in found.values() if name in own]:
                    mean[name] = added(parts) / len(found)
            self.optimizer.step(self.parameters, mean, self._arrived[next(iter(found))][1])
            self.stats.updates += 1
        self._arrived.clear()
        self._version += 1

    def _apply(self, worker: int, gradients: Arrays | None, rates: list[float]) -> None:
        """Step along one gradient, corrected for its delay."""
        self._clock[worker] += 1
        if gradients is None:
            return
        tau = self._version - self._base[worker]
        self.stats.staleness[tau] += 1
        scale = 1 / (1 + tau) if self.rules.correction == "divide" else 1.0
        if self.rules.correction.startswith("compensate"):
            known = self._known[worker]
            gradients = {
                name: self._compensated(name, g, known[name]) for name, g in gradients.items()
            }
        self.optimizer.step(self.parameters, gradients, rates, scale)
        self.stats.updates += 1
        self._version += 1

    def _compensated(self, name: str, g: np.ndarray, known: np.ndarray) -> np.ndarray:
        lam, square = self.rules.lam, g * g
        assert lam is not None
        if self.rules.correction == "compensate":
            return g + lam * square * (self.parameters[name] - known)
        mean = self._squares[name] = _DECAY * self._squares[name] + (1 - _DECAY) * square
        return g + lam / np.sqrt(mean + _EPS) * square * (self.parameters[name] - known)

    # -- replies ------------------------------------------------------------------------------

    def _due(self) -> list[Reply]:
        """Step if that is due, and return the replies to all who may go on."""
        if self.rules.mode == "sync":
            if len(self._arrived) >= max(1, len(self.active) - self.rules.backup):
                self._step_together()
            free = [w for w in self.waiting if w not in self._arrived]
        else:
            slowest = min((self._clock[w] for w in self.active), default=0)
            bound = self.rules.staleness
            free = [w for w in self.waiting if bound is None or self._clock[w] - slowest <= bound]
            ahead = (self._clock[w] - slowest for w in free)
            self.stats.ahead = max(self.stats.ahead, *ahead, 0)
        return [self._reply(w, self.waiting.pop(w)) for w in sorted(free)]

    def _reply(self, worker: int, taken: bool) -> Reply:
        self._base[worker] = self._version
        number = self._replies[worker]
        self._replies[worker] += 1
        parts = [bytes_of(np.array([self._epoch]))]
        if self.rules.is_delta:
            known = self._known[worker]
            new = {name: x - known[name] for name, x in self.parameters.items()}
            # Without states: what is not sent now is in the next difference.
            encoded = self._coders[worker][1].encode(new, {}, number, self._epoch)
            for name, x in encoded.values.items():
                known[name] = known[name] + x
            parts += encoded.parts
        else:
            parts += [bytes_of(x) for x in self.parameters.values()]
            if self.rules.needs_copies:
                self._known[worker] = self._copies()
        message = Message(Kind.PARAMETERS, int(taken), number, parts)
        frame = encode(message, tag_of(self.rules))
        self.stats.bytes_down += frame.nbytes
        return Reply(worker, frame)

    def _copies(self) -> Arrays:
        return {name: x.copy() for name, x in self.parameters.items()}
