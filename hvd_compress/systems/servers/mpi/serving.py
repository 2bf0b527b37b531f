"""The base of a server and its workers over MPI: they answer, wait, leave and end."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from hvd_compress.config import is_number
from hvd_compress.errors import CollectiveTimeout, ConfigError
from hvd_compress.mpi.dense.payloads import broadcast
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.mailbox import Mailbox
from hvd_compress.systems.servers.messages import (
    MessageKind,
    Reply,
    ServerEnd,
    ServerMessage,
    ServerStats,
    WorkerEnd,
    encode,
    tag_of,
)
from hvd_compress.systems.servers.patience import Patience

logger = logging.getLogger("hvd_compress")
T = TypeVar("T")
S = TypeVar("S", bound="Serving")


class Serving:
    """Ranks of which the first serves; making one is a collective.  Subclasses set ``_server``
    there, and ``_link`` on all ranks.

    Args:
        ranks: all of them.
        parameters: by name; all ranks begin with copies of those of the first.
        options: what ranks have to agree about, by its text; messages bear its tag.
        worker_timeout: seconds after which others go on without a silent worker; see
            :class:`hvd_compress.systems.servers.patience.Patience`.
        more: further options that ranks have to agree about, as a text that begins with a comma;
            the tag of messages is not theirs.
    """

    _server: ServerEnd
    _link: WorkerEnd

    def __init__(
        self,
        ranks: Communicator,
        parameters: Mapping[str, np.ndarray],
        options: object,
        worker_timeout: float,
        more: str = "",
    ) -> None:
        name = type(self).__name__
        shapes = [f"{name} {x.dtype.name}{list(x.shape)}" for name, x in parameters.items()]
        ranks.agree(f"{name}({options!r}{more}, {shapes})")
        if ranks.size < 2:
            raise ConfigError(
                f"{name} on 1 rank: there must be a server and a worker, as with mpirun -np 5"
            )
        if not is_number(worker_timeout) or not worker_timeout > 0:
            raise ConfigError(f"worker_timeout={worker_timeout!r} must be seconds, more than 0")
        self.comm = ranks.duplicate(name)
        self.worker_timeout = float(worker_timeout)
        self.is_server = ranks.rank == 0
        self.rank, self.size = ranks.rank - 1, ranks.size - 1
        self._box, self._tag = Mailbox(self.comm), tag_of(options)
        self.parameters = {name: np.array(x, order="C") for name, x in parameters.items()}
        for tensor, x in self.parameters.items():
            bytes_of_all = broadcast(ranks.channel(), x.reshape(-1).view(np.uint8), 0)
            ranks.run(f"{name}(), parameter {tensor!r}", bytes_of_all)

    @property
    def bytes_sent(self) -> int:
        return self._link.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._link.bytes_received

    def _assemble(self) -> None:
        """Take over what the link has received."""
        self.parameters = self._link.parameters

    @property
    def is_over(self) -> bool:
        """Whether the server has ended: in the end, or without this worker."""
        return self._link.is_over

    def stats(self) -> ServerStats:
        """Return what the server has counted, on every rank, after the ``with`` statement."""
        if self._link.stats is None:
            raise ConfigError("stats() has its numbers from the end: call it behind the with")
        return self._link.stats

    # -- workers ------------------------------------------------------------------------------

    def batches(self, data: Iterable[T]) -> Iterator[T]:
        """Yield from ``data`` on workers, as long as the server lives; nothing on the server."""
        if not self.is_server:
            for batch in data:
                if self.is_over:
                    return
                yield batch

    def _wait(self, *, until_end: bool) -> None:
        """Wait for the server's reply, or for its last."""
        self.comm.check()
        link, is_missing, heard = self._link, not self.is_over, time.monotonic()
        while is_missing:
            frames = self._box.arrived()
            for _, frame in frames:
                if link.receive(frame) and (link.is_over or not until_end):
                    is_missing = False
                heard = time.monotonic()
            if not frames:
                self._box.nap()
                if time.monotonic() - heard > self.comm.timeout:
                    problem = (
                        f"rank {self.comm.rank}: no sign of life from the parameter server on rank "
                        f"0 for {self.comm.timeout:g} s"
                    )
                    self.comm.give_up(problem, [self._box])
                    raise CollectiveTimeout(problem)

    # -- the server ---------------------------------------------------------------------------

    def _serve(self) -> None:
        server = self._server
        beat = time.monotonic()
        everyone = range(self.size)
        patience = Patience(everyone, self.worker_timeout, self.comm.timeout, beat)
        while not server.is_over:
            frames = self._box.arrived()
            for rank, frame in frames:
                worker = rank - 1
                patience.heard(worker, server.active, server.waiting, time.monotonic())
                self._reply(server.receive(worker, frame), patience)
                if worker not in server.active:
                    patience.left(time.monotonic())
            now = time.monotonic()
            for worker, seconds in patience.lost(server.active, server.waiting, now).items():
                logger.warning(
                    "worker %d has sent nothing for %.1f s: the others go on without it "
                    "(worker_timeout= says how long they wait)",
                    worker,
                    seconds,
                )
                self._reply(server.lose(worker), patience)
            if now - beat > self.comm.timeout / 10:
                beat = now
                frame = encode(ServerMessage(MessageKind.BEAT), self._tag)
                lost = server.stats.lost
                for worker in {*everyone} - server.active | server.waiting.keys():
                    if worker not in lost:
                        self._box.send(frame, worker + 1)
            if not frames:
                self._box.nap()
        last = server.end()
        for worker in everyone:
            self._box.send(last, worker + 1)
        self._link.receive(last)

    def _reply(self, replies: Iterable[Reply], patience: Patience) -> None:
        for worker, reply in replies:
            self._box.send(reply, worker + 1)
            patience.replied(worker, time.monotonic())

    # -- begin and end ------------------------------------------------------------------------

    def __enter__(self: S) -> S:
        if self.is_server:
            self._serve()
            self._finish()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.is_server or isinstance(error, CollectiveTimeout):
            return
        if error is not None and self.size > 1:
            text = "".join(traceback.format_exception(kind, error, trace))
            print(
                f"worker {self.rank} leaves, and waits for the others to end:\n{text}",
                file=sys.stderr,
                flush=True,
            )
        if not self.is_over:
            self._box.send(self._link.leave(failed=error is not None), 0)
        self._finish()

    def _finish(self) -> None:
        """Wait for the last parameters."""
        self._wait(until_end=True)
        self._assemble()
        found = self.stats()
        gone = {worker + 1 for worker in found.lost}
        _until_left(self._box, gone)
        if gone or found.failed:
            atexit.register(_end_together, self._box, self._tag, gone)


def _until_left(box: Mailbox, gone: Collection[int]) -> None:
    deadline = time.monotonic() + box.comm.timeout
    while not box.has_left(gone) and time.monotonic() < deadline:
        box.nap()


def _end_together(box: Mailbox, tag: int, gone: set[int]) -> None:
    """Wait until all ranks that are left are about to end: launchers end a job when the first of
    its processes ends in an unusual way.  With ranks gone, ``MPI_Finalize`` would never end."""
    comm = box.comm
    here = [rank for rank in range(comm.size) if rank not in gone]
    done, deadline = encode(ServerMessage(MessageKind.DONE), tag), time.monotonic() + comm.timeout
    if comm.rank in here:  # a rank that was taken for lost lives, but nobody counts on it
        is_server, missing = comm.rank == 0, {0}
        if is_server:
            missing = set(here[1:])
        else:
            box.send(done, 0)
        while missing and time.monotonic() < deadline:
            missing -= {rank for rank, _ in box.arrived()}
            box.nap()
        for rank in here[1:] if is_server else ():
            box.send(done, rank)
        _until_left(box, gone)
    if gone:
        time.sleep(0.5)  # the others are about to come here
        sys.stdout.flush()
        sys.stderr.flush()
        logging.shutdown()
        os._exit(1)
