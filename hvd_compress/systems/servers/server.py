"""The two ends of a parameter server: which gradients count, how they are sent, and which workers
may go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import numpy
from hvd_compress.base import Compressor, Context, State
from hvd_compress.config import Configurable, check_choice, check_whole, converted
from hvd_compress.errors import ConfigError, PayloadError, UnsupportedError
from hvd_compress.methods import NoCompression
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.base import Arrays, all_finite, checked_compression
from hvd_compress.systems.servers.messages import (
    MessageKind,
    Reply,
    ServerEnd,
    ServerMessage,
    WorkerEnd,
    arrays_of,
)
from hvd_compress.systems.servers.optimizers import ArrayOptimizer, ServerOptimizer

#: what methods may need that workers do not know
_UNKNOWN = {
    "takes_momentum": "the optimizer's momentum",
    "needs_epoch": "epochs",
    "needs_gradient_norm": "the norm of all gradients",
}


def _as_compression(compression: Any) -> Compressor:
    method = checked_compression(compression, "a server takes gradients")
    for trait, what in _UNKNOWN.items():
        if getattr(method, trait):
            raise _refused(method, f"it needs {what}")
    return method


@dataclasses.dataclass(frozen=True)
class Rules(Configurable, kind="parameter server", name="rules"):
    """The rules of a parameter server with n workers.

    A worker sends a gradient and gets parameters back; the reply comes when the worker may begin
    its next step.

    Args:
        mode: "sync": a step is the mean of the first n - ``backup`` gradients at the current
            parameters.  "async": every gradient is a step, as soon as it arrives.
        backup: of "sync": that many workers may be late; what arrives for a step that is over is
            dropped.
        compression: of gradients, with the worker's residual.

    Reference: Li et al., OSDI 2014; Chen et al., 2016 (backup workers).

    >>> Rules(backup=1, compression="topk:density=0.01").mode
    'sync'
    """

    mode: str = "sync"
    backup: int = 0
    compression: Compressor = dataclasses.field(
        default=NoCompression(), metadata=converted(_as_compression)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mode", self.mode, ("sync", "async"))
        check_whole("backup", self.backup, 0)
        if self.backup and self.mode != "sync":
            raise ConfigError(f"backup={self.backup} needs mode='sync': in 'async' nobody waits")

    def check_workers(self, workers: int) -> None:
        """Raise ``ConfigError`` unless the rules fit the number of workers."""
        if self.backup >= workers:
            raise ConfigError(
                f"backup={self.backup} of {workers} workers: a step takes a gradient of one at "
                f"least, so backup can be up to {workers - 1} here"
            )


class LinkCoder:
    """Both ends of the way of one worker's gradients.  Each tensor is a part of its own in a
    message; the part is empty if there is nothing to send."""

    def __init__(self, rules: Rules, worker: int, seed: int = 0) -> None:
        self.method = rules.compression
        # Workers draw different random numbers, which the server can draw again.
        self._context = Context(seed=seed * 2**20 + worker)

    def encode(
        self, arrays: Mapping[str, np.ndarray | None], states: Mapping[str, State], step: int
    ) -> tuple[list[np.ndarray], dict[str, State]]:
        """Return the parts of a message of arrays by name, and the new states; ``states`` lacks
        those of tensors that were never sent."""
        parts, after, context = [], dict(states), self._context._replace(step=step)
        for name, x in arrays.items():
            if x is None or not x.size:
                parts.append(np.empty(0, np.uint8))
                continue
            method = self._method(name, x)
            state = states[name] if name in states else method.init(x)
            try:
                encoded = method.encode(x, state, context._replace(name=name))
            except UnsupportedError as error:
                raise _refused(method, str(error)) from None
            parts.append(encoded.message)
            after[name] = encoded.state
        return parts, after

    def decode(
        self, parts: Sequence[np.ndarray], like: Mapping[str, np.ndarray], step: int, sender: str
    ) -> Arrays:
        """Return arrays of the shapes and dtypes of ``like`` from the parts of a message, without
        those that are not in it.

        Raises:
            PayloadError: the parts are not what the method would have sent.
        """
        if len(parts) != len(like):
            raise PayloadError(f"bad payload from {sender}: {len(parts)} parts of {len(like)}")
        found, context = {}, self._context._replace(step=step)
        for (name, x), part in zip(like.items(), parts, strict=True):
            if not part.size:
                continue
            method = self._method(name, x)
            try:
                found[name] = method.decode(part, x, context._replace(name=name))
            except PayloadError as error:
                text = str(error).replace(f"rank {context.rank}", f"{sender}, {name!r}", 1)
                raise PayloadError(text) from None
        return found

    def _method(self, name: str, x: np.ndarray) -> Compressor:
        method = self.method.for_tensor(name, x.shape)
        if method.common(x):
            raise _refused(method, "its tensors share a state")
        return method


def _refused(method: Compressor, reason: str) -> ConfigError:
    return ConfigError(
        f"compression={method.name!r} cannot be sent to a server: {reason}; use a method whose "
        "messages stand alone, such as 'topk', 'efsignsgd' or 'fp16'"
    )


class Server(ServerEnd):
    """The server, which owns the parameters.

    Args:
        parameters: by name, float32 or float64; copied.
        optimizer: steps on them; or a formula to step by.
        workers: the numbers of the workers, all of which know ``parameters``.
        rules: the same at all workers.
        seed: of random numbers that server and workers share.

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
        seed: int = 0,
    ) -> None:
        super().__init__(parameters, workers)
        self.rules = rules
        self.optimizer: ServerOptimizer = (
            ArrayOptimizer(optimizer) if isinstance(optimizer, Formula) else optimizer
        )
        self._version = 0
        self._base = dict.fromkeys(self.active, 0)  # the version that a worker has
        self._arrived: dict[int, tuple[Arrays | None, list[float]]] = {}  # of this step
        self._coders = {w: LinkCoder(rules, w, seed) for w in self.active}

    def _pushed(self, worker: int, message: ServerMessage, is_back: bool) -> list[Reply]:
        if is_back:
            self.stats.dropped[worker] += 1
            return [self._reply(worker, False)]
        head, *parts = message.parts
        rates = head.view("<f8").tolist()
        if self.rules.mode == "sync" and self._base[worker] != self._version:
            self.stats.dropped[worker] += 1  # it is of a step that is over
            self.waiting[worker] = False
            return self._due()
        sender = f"worker {worker}"
        read = self._coders[worker].decode(parts, self.parameters, message.number, sender)
        found = read if all_finite(read) else None
        self.stats.non_finite += found is None
        self.waiting[worker] = found is not None
        if self.rules.mode == "sync":
            self._arrived[worker] = found, rates
        elif found is not None:
            self.stats.staleness[self._version - self._base[worker]] += 1
            self.optimizer.step(self.parameters, found, rates)
            self.stats.updates += 1
            self._version += 1
        return self._due()

    def _without(self, worker: int, parts: Sequence[np.ndarray] = ()) -> list[Reply]:
        super()._without(worker)
        self.waiting.pop(worker, None)
        self._arrived.pop(worker, None)
        return self._due()

    def _due(self) -> list[Reply]:
        """Step if that is due, and return the replies to all who may go on.

        A common step is along the mean of what has arrived, added in the order of the workers.  A
        gradient that only some have counts as zero on the others; without any there is no step.
        """
        enough = max(1, len(self.active) - self.rules.backup)
        if self.rules.mode == "sync" and len(self._arrived) >= enough:
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
        free = [w for w in self.waiting if w not in self._arrived]
        return [self._reply(w, self.waiting.pop(w)) for w in sorted(free)]

    def _reply(self, worker: int, taken: bool) -> Reply:
        self._base[worker] = self._version
        parts = [numpy.to_bytes(x) for x in self.parameters.values()]
        return self._to(worker, ServerMessage(MessageKind.PARAMETERS, int(taken), parts=parts))


class Link(WorkerEnd):
    """A worker's end of the way to the server.

    Args:
        parameters: those that the server owns, as it has them in the beginning.
        worker: the worker's number.
        rules, seed: those of the server.

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
        seed: int = 0,
    ) -> None:
        super().__init__(parameters)
        self.states: dict[str, State] = {}
        self.taken = True
        self._coder = LinkCoder(rules, worker, seed)
        self._pending: dict[str, State] | None = None
        self._pushes = 0

    def push(
        self, gradients: Mapping[str, np.ndarray | None], rates: Sequence[float] = ()
    ) -> np.ndarray:
        """Return the frame of gradients by the names of the parameters; ``None`` for one that has
        no gradient.

        Args:
            rates: the learning rate of each group of parameters; none for the server's own.
        """
        if self._pending is not None:
            raise ConfigError("a gradient is under way: wait for the reply before the next one")
        if gradients.keys() != self.parameters.keys():
            raise ConfigError(
                f"gradients of {sorted(gradients)}, not of {sorted(self.parameters)}; None stands "
                "for one that is not there"
            )
        ordered = {name: gradients[name] for name in self.parameters}
        number = self._pushes
        parts, self._pending = self._coder.encode(ordered, self.states, number)
        self._pushes = number + 1
        head = np.array(rates, "<f8").view(np.uint8)
        return self._sent(ServerMessage(MessageKind.PUSH, 0, number, [head, *parts]))

    def _replied(self, message: ServerMessage) -> None:
        self.parameters = arrays_of(message.parts, self.parameters, "the server")
        self.taken = bool(message.flag)
        if self._pending is not None and self.taken:
            self.states = self._pending
        self._pending = None
