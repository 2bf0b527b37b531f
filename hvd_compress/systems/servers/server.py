"""The server's end: whose gradient counts, and who may go on."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.base import Compressor
from hvd_compress.errors import PayloadError
from hvd_compress.systems.servers.coding import Coder
from hvd_compress.systems.servers.messages import Kind, Message, decode, encode
from hvd_compress.systems.servers.optimizers import ServerOptimizer
from hvd_compress.systems.servers.pieces import Arrays, is_finite
from hvd_compress.systems.servers.rules import Rules

_DECAY, _EPS = 0.95, 1e-7  # of the adaptive compensation


class Reply(NamedTuple):
    """A frame to a worker."""

    worker: int
    frame: np.ndarray


@dataclasses.dataclass
class ServerStats:
    """What a server has counted.

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


class Server:
    """One server, with the parameters that it owns.  It talks to no network: it takes frames and
    returns frames.

    Args:
        parameters: its pieces by name, float32 or float64; copied.
        optimizer: steps on them.
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
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        optimizer: ServerOptimizer,
        workers: Iterable[int],
        rules: Rules,
        *,
        seed: int = 0,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.parameters: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.optimizer, self.rules = optimizer, rules
        self.active = set(workers)
        self.waiting: dict[int, bool] = {}  # whether the gradient was taken
        self.stats = ServerStats()
        self._version = 0
        self._base = dict.fromkeys(self.active, 0)  # the version that a worker has
        self._clock = dict.fromkeys(self.active, 0)  # its steps
        self._epoch = math.nan
        self._arrived: dict[int, tuple[Any, list[float]]] = {}  # of this step
        self._known = {w: self._copies() for w in self.active} if rules.needs_copies else {}
        self._squares = {name: np.zeros_like(x) for name, x in self.parameters.items()}
        self._replies = Counter[int]()
        ways = {worker: coders(rules, seed, worker, momentum, nesterov) for worker in self.active}
        self._up = {worker: up for worker, (up, _) in ways.items()}
        self._down = {worker: down for worker, (_, down) in ways.items()}

    # -- what happens -------------------------------------------------------------------------

    def receive(self, worker: int, frame: np.ndarray) -> list[Reply]:
        """Take a frame, and return the replies that are due now, to this worker or others.

        Raises:
            PayloadError: the frame is damaged, or of other rules.
        """
        sender = f"worker {worker}"
        message = decode(frame, self.rules.tag, sender)
        if message.kind is Kind.LEAVE:
            self.stats.left(worker, bool(message.flag))
            return self._without(worker)
        self.stats.bytes_up += frame.nbytes
        return self._take(worker, message, sender)

    def _take(self, worker: int, message: Message, sender: str) -> list[Reply]:
        self.stats.pushes += 1
        parts = iter(message.parts)
        self._epoch, *rates = next(parts).view("<f8").tolist()
        names = self._named(next(parts, None) if message.flag else None, sender)
        gradients = self._decoded(worker, parts, names, message.number, sender)
        if gradients is None:
            self.stats.non_finite += 1
        if worker not in self.active:
            return self._returned(worker)
        if self.rules.mode == "sync":
            self._arrive(worker, gradients, rates)
        else:
            self._apply(worker, gradients, rates)
        return self._due()

    def _named(self, mask: np.ndarray | None, sender: str) -> list[str]:
        """Return the names of the pieces of which a message has a gradient."""
        names = list(self.parameters)
        if mask is None:
            return names
        if mask.size != len(names):
            raise PayloadError(f"bad payload from {sender}: {mask.size} marks for {names}")
        return [name for name, is_there in zip(names, mask, strict=True) if is_there]

    def _decoded(
        self,
        worker: int,
        parts: Iterator[np.ndarray],
        names: Sequence[str],
        number: int,
        sender: str,
    ) -> Any | None:
        """Return a worker's gradients, or ``None`` if they are not finite."""
        like = {name: self.parameters[name] for name in names}
        found = self._up[worker].decode(parts, like, number, self._epoch, sender)
        return found if is_finite(found) else None

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
        parts = [x.reshape(-1).view(np.uint8) for x in self.parameters.values()]
        return encode(Message(Kind.END, parts=[self.stats.to_bytes(), *parts]), self.rules.tag)

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

    def _arrive(self, worker: int, gradients: Any, rates: list[float]) -> None:
        """Keep a gradient for the step of now, or drop it."""
        self.waiting[worker] = gradients is not None
        if self._base[worker] != self._version:
            self.stats.dropped[worker] += 1
            self.waiting[worker] = False
        else:
            self._arrived[worker] = gradients, rates

    def _step_together(self) -> None:
        """Step along the mean of what has arrived, added in the order of the workers.  Where some
        have no gradient it counts as zero, and where nobody has one there is no step."""
        found = [(g, rates) for _, (g, rates) in sorted(self._arrived.items()) if g is not None]
        self._arrived.clear()
        self._version += 1
        if not found:
            return
        self.stats.staleness[0] += len(found)
        mean = {}
        for name in self.parameters:
            if own := [gradients[name] for gradients, _ in found if name in gradients]:
                total = own[0]
                for other in own[1:]:
                    total = total + other
                mean[name] = total / len(found)
        self.optimizer.step(self.parameters, mean, found[0][1])
        self.stats.updates += 1

    def _apply(self, worker: int, gradients: Arrays | None, rates: list[float]) -> None:
        """Step along one gradient, corrected for its delay."""
        self._clock[worker] += 1
        self.waiting[worker] = gradients is not None
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
            if self._are_there():
                self._step_together()
            free = [w for w in self.waiting if w not in self._arrived]
        else:
            slowest = min((self._clock[w] for w in self.active), default=0)
            bound = self.rules.staleness
            free = [w for w in self.waiting if bound is None or self._clock[w] - slowest <= bound]
            ahead = (self._clock[w] - slowest for w in free)
            self.stats.ahead = max(self.stats.ahead, *ahead, 0)
        return [self._reply(w, self.waiting.pop(w)) for w in sorted(free)]

    def _are_there(self) -> bool:
        """Whether enough gradients have arrived for a step."""
        enough = max(1, len(self.active) - self.rules.backup)
        return len(self._arrived) >= enough

    def _reply(self, worker: int, taken: bool) -> Reply:
        self._base[worker] = self._version
        number = self._replies[worker]
        self._replies[worker] += 1
        parts = self._orders(worker)
        if self.rules.is_delta:
            known = self._known[worker]
            new = {name: x - known[name] for name, x in self.parameters.items()}
            # Without states: what is not sent now is in the next difference.
            encoded = self._down[worker].encode(new, {}, number, self._epoch)
            for name, x in encoded.values.items():
                known[name] = known[name] + x
            parts += encoded.parts
        else:
            parts += [x.reshape(-1).view(np.uint8) for x in self.parameters.values()]
            if self.rules.needs_copies:
                self._known[worker] = self._copies()
        return self._sent(worker, Message(Kind.PARAMETERS, int(taken), number, parts))

    def _orders(self, worker: int) -> list[np.ndarray]:
        """What stands before the parameters."""
        return [np.array([self._epoch]).view(np.uint8)]

    def _sent(self, worker: int, message: Message) -> Reply:
        frame = encode(message, self.rules.tag)
        self.stats.bytes_down += frame.nbytes
        return Reply(worker, frame)

    def _copies(self) -> Arrays:
        return {name: x.copy() for name, x in self.parameters.items()}


def coders(
    rules: Rules, seed: int, worker: int, momentum: float, nesterov: bool
) -> tuple[Coder, Coder]:
    """Return the compressions of the ways from a worker and to it."""
    # Workers draw different random numbers, which the server can draw again.
    own = seed * 2**20 + worker

    def coder(method: Compressor) -> Coder:
        return Coder(method, own, *((momentum, nesterov) if method.takes_momentum else ()))

    return coder(rules.compression), coder(rules.compression_down)
