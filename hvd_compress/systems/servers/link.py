"""The worker's end, towards one server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hvd_compress.base import State
from hvd_compress.errors import ConfigError
from hvd_compress.systems.servers.coding import coders
from hvd_compress.systems.servers.messages import Kind, Message, decode, encode, tag_of
from hvd_compress.systems.servers.pieces import Arrays, arrays_of
from hvd_compress.systems.servers.rules import Rules
from hvd_compress.systems.servers.stats import ServerStats


class Link:
    """A worker's end of the way to one server.

    Args:
        parameters: the pieces that the server owns, as it has them in the beginning.
        worker: the worker's number.
        rules, seed, momentum, nesterov: those of the server.
        server: what messages call the server.

    Attributes:
        parameters: the pieces as this worker knows them.
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
        server: str = "the server",
    ) -> None:
        self.parameters: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.states: dict[str, State] = {}
        self.taken = True
        self.stats: ServerStats | None = None
        self.bytes_sent = self.bytes_received = 0
        self._rules, self._server = rules, server
        self._up, self._down = coders(rules, worker, seed, momentum, nesterov)
        self._pending: dict[str, State] | None = None
        self._pushes = 0

    @property
    def is_over(self) -> bool:
        """Whether the server has said that there is nothing more to do."""
        return self.stats is not None

    def push(
        self,
        gradients: Mapping[str, np.ndarray],
        rates: Sequence[float] = (),
        epoch: float | None = None,
    ) -> np.ndarray:
        """Return the frame of a gradient, by the names of the pieces; one that is left out has no
        gradient.

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
        encoded = self._up.encode(ordered, self.states, self._pushes, known)
        self._pending = {**self.states, **encoded.states}
        parts += encoded.parts
        self._pushes += 1
        return self._sent(Message(Kind.PUSH, int(is_partial), self._pushes - 1, parts))

    def _sent(self, message: Message) -> np.ndarray:
        frame = encode(message, tag_of(self._rules))
        self.bytes_sent += frame.nbytes
        return frame

    def leave(self, *, failed: bool = False) -> np.ndarray:
        """Return the frame that says that this worker sends no more."""
        return encode(Message(Kind.LEAVE, int(failed)), tag_of(self._rules))

    def receive(self, frame: np.ndarray) -> bool:
        """Take a frame of the server, and return whether it is the one that was waited for: a reply
        to a gradient, or the end.

        Raises:
            PayloadError: the frame is damaged, or of other rules.
        """
        message = decode(frame, tag_of(self._rules), self._server)
        if message.kind is Kind.BEAT:
            return False
        self.bytes_received += frame.nbytes
        parts = iter(message.parts)
        if message.kind is Kind.END:
            self.stats = ServerStats.from_bytes(next(parts))
            self.parameters = arrays_of(parts, self.parameters, self._server)
            return True
        (epoch,) = next(parts).view("<f8").tolist()
        if self._rules.is_delta:
            new = self._down.decode(parts, self.parameters, message.number, epoch, self._server)
            self.parameters = {name: x + new[name] for name, x in self.parameters.items()}
        else:
            self.parameters = arrays_of(parts, self.parameters, self._server)
        self.taken = bool(message.flag)
        if self._pending is not None and self.taken:
            self.states = self._pending
        self._pending = None
        return True
