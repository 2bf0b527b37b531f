"""The two ends of a way between a worker and a server, as far as all kinds of servers have them."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvd_compress.systems.servers.messages import (
    Arrays,
    MessageKind,
    ServerMessage,
    ServerStats,
    arrays_of,
    bytes_of,
    decode,
    encode,
    tag_of,
)


class Reply(NamedTuple):
    """A frame to a worker."""

    worker: int
    frame: np.ndarray


class ServerEnd(abc.ABC):
    """A server.  It talks to no network: it takes frames and returns frames.

    Args:
        parameters: by name; copied.
        workers: their numbers.
        options: the same at all workers, by their text.

    Attributes:
        parameters: those of now.
        active: the workers that are expected to push.
        waiting: those of them that wait for a reply, and whether their gradient was taken.
        stats: a :class:`ServerStats`.
    """

    def __init__(
        self, parameters: Mapping[str, np.ndarray], workers: Iterable[int], options: object
    ) -> None:
        self.parameters: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.active = set(workers)
        self.waiting: dict[int, bool] = {}
        self.stats = ServerStats()
        self._tag = tag_of(options)

    @property
    def is_over(self) -> bool:
        """Whether no worker is left."""
        return not self.active

    def receive(self, worker: int, frame: np.ndarray) -> list[Reply]:
        """Take a frame, and return the replies that are due now, to this worker or others.

        Raises:
            PayloadError: the frame is damaged, or of other rules.
        """
        message = decode(frame, self._tag, f"worker {worker}")
        if message.kind is MessageKind.LEAVE:
            self.stats.left(worker, bool(message.flag))
            return self._left(worker, message)
        self.stats.bytes_up += frame.nbytes
        self.stats.pushes += 1
        if worker in self.active:
            return self._pushed(worker, message)
        if worker in self.stats.lost:
            self.stats.lost.remove(worker)
        self.stats.returned.append(worker)
        return self._returned(worker, message)

    def lose(self, worker: int) -> list[Reply]:
        """Do without a worker that was silent too long; if it comes back, it goes on from the
        parameters of then."""
        if worker in self.active:
            self.stats.lost.append(worker)
        return self._without(worker)

    def end(self) -> np.ndarray:
        """Return the last frame, with the last parameters and the statistics."""
        arrays = [bytes_of(x) for x in self._last_parameters().values()]
        return encode(
            ServerMessage(MessageKind.END, parts=[self.stats.to_bytes(), *arrays]), self._tag
        )

    def _to(self, worker: int, message: ServerMessage) -> Reply:
        frame = encode(message, self._tag)
        self.stats.bytes_down += frame.nbytes
        return Reply(worker, frame)

    def _last_parameters(self) -> Arrays:
        return self.parameters

    def _left(self, worker: int, message: ServerMessage) -> list[Reply]:
        """Go on without a worker that has said that it leaves."""
        return self._without(worker)

    def _without(self, worker: int) -> list[Reply]:
        """Go on without a worker."""
        self.active.discard(worker)
        return []

    @abc.abstractmethod
    def _pushed(self, worker: int, message: ServerMessage) -> list[Reply]:
        """Take what a worker has pushed."""

    @abc.abstractmethod
    def _returned(self, worker: int, message: ServerMessage) -> list[Reply]:
        """Take up a worker that was taken for lost."""


class WorkerEnd(abc.ABC):
    """A worker's end of the way to one server.

    Attributes:
        parameters: as this worker knows them.
        stats: the server's statistics, when all is over.
        bytes_sent, bytes_received: of all messages.
    """

    def __init__(
        self, parameters: Mapping[str, np.ndarray], options: object, server: str = "the server"
    ) -> None:
        self.parameters: Arrays = {name: np.array(x) for name, x in parameters.items()}
        self.stats: ServerStats | None = None
        self.bytes_sent = self.bytes_received = 0
        self._server, self._tag = server, tag_of(options)

    @property
    def is_over(self) -> bool:
        """Whether the server has said that there is nothing more to do."""
        return self.stats is not None

    def leave(self, *, failed: bool = False) -> np.ndarray:
        """Return the frame that says that this worker sends no more."""
        parts = [] if failed else self._last_parts()
        return encode(ServerMessage(MessageKind.LEAVE, int(failed), parts=parts), self._tag)

    def receive(self, frame: np.ndarray) -> bool:
        """Take a frame of the server, and return whether it is the one that was waited for: a reply
        to a push, or the end.

        Raises:
            PayloadError: the frame is damaged, or of other rules.
        """
        message = decode(frame, self._tag, self._server)
        if message.kind is MessageKind.BEAT:
            return False
        self.bytes_received += frame.nbytes
        if message.kind is MessageKind.END:
            head, *parts = message.parts
            self.stats = ServerStats.from_bytes(head)
            self.parameters = arrays_of(parts, self.parameters, self._server)
        else:
            self._replied(message)
        return True

    def _sent(self, message: ServerMessage) -> np.ndarray:
        frame = encode(message, self._tag)
        self.bytes_sent += frame.nbytes
        return frame

    def _last_parts(self) -> Sequence[np.ndarray]:
        """Return what goes with the news that this worker leaves."""
        return []

    @abc.abstractmethod
    def _replied(self, message: ServerMessage) -> None:
        """Take the reply to a push."""
