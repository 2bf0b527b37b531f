"""The server's end: whose gradient counts, and who may go on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.errors import PayloadError
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.servers.messages import Kind, Message, decode, encode, tag_of
from hvd_compress.systems.servers.optimizers import ServerOptimizer, as_server_optimizer
from hvd_compress.systems.servers.pieces import Arrays, added, bytes_of
from hvd_compress.systems.servers.rules import Rules
from hvd_compress.systems.servers.stats import ServerStats
from hvd_compress.systems.servers.ways import coders, reader_of

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
        way: what gradients travel by, see :mod:`.ways`.
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
        self._arrived: dict[int, tuple[Any, list[float]]] = {}  # of this step
        self._owing: set[int] = set()  # who was asked for more, and has not answered yet
        self._answers: dict[int, Any] = {}
        self._known = {w: self._copies() for w in self.active} if rules.needs_copies else {}
        self._squares = {name: np.zeros_like(x) for name, x in self.parameters.items()}
        self._replies = Counter[int]()
        ends = {worker: coders(rules, worker, seed, momentum, nesterov) for worker in self.active}
        self._down = {worker: down for worker, (_, down) in ends.items()}
        self.way = reader_of(
            rules, self.parameters, {worker: up for worker, (up, _) in ends.items()}
        )

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
        if message.kind is Kind.ANSWER:
            return self._answered(worker, message.parts)
        self.stats.pushes += 1
        if worker not in self.active:
            return self._returned(worker)
        parts = iter(message.parts)
        self._epoch, *rates = next(parts).view("<f8").tolist()
        names = self._named(next(parts, None) if message.flag else None, sender)
        if self.rules.mode == "sync" and (self._base[worker] != self._version or self._is_asking):
            self.stats.dropped[worker] += 1  # it is of a step that is over, or too late for this
            self.waiting[worker] = False
            return self._due()
        like = {name: self.parameters[name] for name in names}
        found: Any = self.way.decode(worker, parts, like, message.number, self._epoch)
        self.stats.non_finite += found is None
        self.waiting[worker] = found is not None
        if self.rules.mode == "sync":
            self._arrived[worker] = found, rates
        else:
            self._apply(worker, found, rates)
        return self._due()

    def _answered(self, worker: int, parts: Sequence[np.ndarray]) -> list[Reply]:
        """Take the answer to a question about this step's gradient."""
        if worker not in self.active:
            return self._returned(worker)
        if worker not in self._owing:
            raise PayloadError(f"bad payload from worker {worker}: an answer, and nobody has asked")
        self._answers[worker] = self.way.answered(worker, parts)
        self._owing.discard(worker)
        self.waiting[worker] = True
        return self._due()

    @property
    def _is_asking(self) -> bool:
        return bool(self._owing or self._answers)

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
        for kept in (self._arrived, self._answers):
            kept.pop(worker, None)
        self._owing.discard(worker)
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

    def _ask(self) -> list[Reply]:
        """Ask workers for more where the way needs it, and step if nobody has to be asked."""
        found = {w: own for w, (own, _) in sorted(self._arrived.items()) if own is not None}
        questions = self.way.questions(found)
        if questions is None:
            for worker in self._arrived:
                self.stats.dropped[worker] += worker in found
                self.waiting[worker] = False
            self._end_step()
            return []
        if not questions:
            self._step_together()
        for worker in questions:
            del self.waiting[worker]
        self._owing = set(questions)
        return [
            self._sent(worker, Message(Kind.ASK, parts=parts))
            for worker, parts in questions.items()
        ]

    def _step_together(self) -> None:
        """Step along the mean of what has arrived, added in the order of the workers.  Where some
        have no gradient it counts as zero, and where nobody has one there is no step."""
        found = {w: own for w, (own, _) in sorted(self._arrived.items()) if own is not None}
        if found:
            gradients = self.way.gradients(found, self._answers)
            self.stats.staleness[0] += len(found)
            mean = {}
            for name in self.parameters:
                if own := [gradients[w][name] for w in found if name in gradients[w]]:
                    mean[name] = added(own) / len(found)
            self.optimizer.step(self.parameters, mean, self._arrived[next(iter(found))][1])
            self.stats.updates += 1
        self._end_step()

    def _end_step(self) -> None:
        self._arrived.clear()
        self._answers.clear()
        self._version += 1
        self.way.turn(self.active)

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
        asked: list[Reply] = []
        if self.rules.mode == "sync":
            if self._is_asking:
                if not self._owing:
                    self._step_together()
            elif len(self._arrived) >= max(1, len(self.active) - self.rules.backup):
                asked = self._ask()
            free = [w for w in self.waiting if w not in self._arrived]
        else:
            slowest = min((self._clock[w] for w in self.active), default=0)
            bound = self.rules.staleness
            free = [w for w in self.waiting if bound is None or self._clock[w] - slowest <= bound]
            ahead = (self._clock[w] - slowest for w in free)
            self.stats.ahead = max(self.stats.ahead, *ahead, 0)
        return asked + [self._reply(w, self.waiting.pop(w)) for w in sorted(free)]

    def _reply(self, worker: int, taken: bool) -> Reply:
        self._base[worker] = self._version
        number = self._replies[worker]
        self._replies[worker] += 1
        orders, parts = self.way.orders(worker)
        parts = [bytes_of(np.array([self._epoch, *orders])), *parts]
        if self.rules.is_delta:
            known = self._known[worker]
            new = {name: x - known[name] for name, x in self.parameters.items()}
            # Without states: what is not sent now is in the next difference.
            encoded = self._down[worker].encode(new, {}, number, self._epoch)
            for name, x in encoded.values.items():
                known[name] = known[name] + x
            parts += encoded.parts
        else:
            parts += [bytes_of(x) for x in self.parameters.values()]
            if self.rules.needs_copies:
                self._known[worker] = self._copies()
        return self._sent(worker, Message(Kind.PARAMETERS, int(taken), number, parts))

    def _sent(self, worker: int, message: Message) -> Reply:
        frame = encode(message, tag_of(self.rules))
        self.stats.bytes_down += frame.nbytes
        return Reply(worker, frame)

    def _copies(self) -> Arrays:
        return {name: x.copy() for name, x in self.parameters.items()}
