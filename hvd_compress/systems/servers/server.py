"""The two ends of a parameter server: which gradients count, how they are sent, and which workers
may go on."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

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
    bytes_of,
)
from hvd_compress.systems.servers.optimizers import ArrayOptimizer, ServerOptimizer

_as_compression = functools.partial(checked_compression, sent="a server takes gradients")


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
    """Both ends of the way of one worker's gradients, each tensor of which is a message of its own;
    for the options see :class:`Server`."""

    def __init__(
        self,
        rules: Rules,
        worker: int,
        *,
        seed: int = 0,
        momentum: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        self.method = rules.compression
        # Workers draw different random numbers, which the server can draw again.
        self._context = Context(seed=seed * 2**20 + worker)
        if self.method.takes_momentum:
            self._context = self._context._replace(momentum=momentum, nesterov=nesterov)

    def encode(
        self, arrays: Mapping[str, np.ndarray], states: Mapping[str, State], step: int, epoch: float
    ) -> tuple[list[np.ndarray], dict[str, State]]:
        """Return the parts of a message of arrays by name, and the new states; ``states`` lacks
        those of tensors that were never sent."""
        parts, after, context = [], {}, self._in_step(step, epoch)
        if self.method.needs_gradient_norm:
            squares = [float(np.sum(np.square(x, dtype=float))) for x in arrays.values()]
            context = context._replace(gradient_norm=math.sqrt(sum(squares)))
        for name, x in arrays.items():
            if not x.size:
                continue
            method = self._method(name, x)
            state = states.get(name)
            state = method.init(x) if state is None else state
            try:
                encoded = method.encode(x, state, context._replace(name=name))
            except UnsupportedError as error:
                raise _refused(method, str(error)) from None
            parts.append(encoded.message)
            after[name] = encoded.state
        return parts, after

    def decode(
        self,
        parts: Iterator[np.ndarray],
        like: Mapping[str, np.ndarray],
        step: int,
        epoch: float,
        sender: str,
    ) -> Arrays:
        """Return arrays of the shapes and dtypes of ``like`` from the parts of a message."""
        found, context = {}, self._in_step(step, epoch)
        for name, shape in like.items():
            if not shape.size:
                found[name] = shape
                continue
            if (part := next(parts, None)) is None:
                raise PayloadError(f"bad payload from {sender}, {name!r}: a part is missing")
            method = self._method(name, shape)
            try:
                found[name] = method.decode(part, shape, context._replace(name=name))
            except PayloadError as error:
                text = str(error).replace(f"rank {context.rank}", f"{sender}, {name!r}", 1)
                raise PayloadError(text) from None
        if next(parts, None) is not None:
            raise PayloadError(f"bad payload from {sender}: parts that belong to no parameter")
        return found

    def _method(self, name: str, x: np.ndarray) -> Compressor:
        method = self.method.for_tensor(name, x.shape)
        if method.common(x):
            raise _refused(method, "its tensors share a state")
        return method

    def _in_step(self, step: int, epoch: float) -> Context:
        return self._context._replace(step=step, epoch=None if math.isnan(epoch) else epoch)


def _refused(method: Compressor, reason: str) -> ConfigError:
    return ConfigError(
        f"compression={method.name!r} cannot be sent to a server: {reason}; use a method whose "
        "messages stand alone, such as 'topk', 'dgc:small=sparse', 'efsignsgd' or 'fp16'"
    )


class Server(ServerEnd):
    """The server, which owns the parameters.

    Args:
        parameters: by name, float32 or float64; copied.
        optimizer: steps on them; or a formula to step by.
        workers: the numbers of the workers, all of which know ``parameters``.
        rules: the same at all workers.
        options: ``seed``, of random numbers that servers and workers share; ``momentum`` and
            ``nesterov``, for compressions that take momentum over, so that ``optimizer`` must have
            none.

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
        **options: Any,
    ) -> None:
        super().__init__(parameters, workers, rules)
        self.rules = rules
        self.optimizer: ServerOptimizer = (
            ArrayOptimizer(optimizer) if isinstance(optimizer, Formula) else optimizer
        )
        self._version = 0
        self._base = dict.fromkeys(self.active, 0)  # the version that a worker has
        self._arrived: dict[int, tuple[Arrays | None, list[float]]] = {}  # of this step
        self._coders = {w: LinkCoder(rules, w, **options) for w in self.active}

    def _pushed(self, worker: int, message: ServerMessage, is_back: bool) -> list[Reply]:
        if is_back:
            self.stats.dropped[worker] += 1
            return [self._reply(worker, False)]
        sender = f"worker {worker}"
        parts = iter(message.parts)
        epoch, *rates = next(parts).view("<f8").tolist()
        names = list(self.parameters)
        if message.flag:  # one mark for each parameter
            marks = next(parts, np.empty(0))
            if marks.size != len(names):
                raise PayloadError(f"bad payload from {sender}: {marks.size} marks for {names}")
            names = [name for name, is_there in zip(names, marks, strict=True) if is_there]
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
        parts = [bytes_of(x) for x in self.parameters.values()]
        return self._to(worker, ServerMessage(MessageKind.PARAMETERS, int(taken), parts=parts))


class Link(WorkerEnd):
    """A worker's end of the way to the server.

    Args:
        parameters: those that the server owns, as it has them in the beginning.
        worker: the worker's number.
        rules, options: those of the server.

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
        **options: Any,
    ) -> None:
        super().__init__(parameters, rules)
        self.states: dict[str, State] = {}
        self.taken = True
        self._coder = LinkCoder(rules, worker, **options)
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
        number = self._pushes
        coded, states = self._coder.encode(ordered, self.states, number, known)
        self._pending, self._pushes = {**self.states, **states}, number + 1
        return self._sent(
            ServerMessage(MessageKind.PUSH, int(is_partial), number, [*parts, *coded])
        )

    def _replied(self, message: ServerMessage) -> None:
        self.parameters = arrays_of(message.parts, self.parameters, "the server")
        self.taken = bool(message.flag)
        if self._pending is not None and self.taken:
            self.states = self._pending
        self._pending = None
