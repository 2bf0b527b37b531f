"""The base of servers and workers over MPI: they answer, wait, leave and end."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from hvd_compress.config import is_number, is_whole
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
    """Ranks of which the first serve; making one is a collective.  Subclasses set ``_server`` on
    these, and ``_links``, one for each server, on all ranks.

    Args:
        ranks: all of them.
        parameters: by name; all ranks begin with copies of those of the first.
        options: what ranks have to agree about, by its text; messages bear its tag.
        servers: how many serve.
        worker_timeout: seconds after which others go on without a silent worker; see
            :class:`hvd_compress.systems.servers.patience.Patience`.
        more: further options that ranks have to agree about, as a text that begins with a comma;
            the tag of messages is not theirs.
    """

    _server: ServerEnd
    _links: Sequence[WorkerEnd]

    def __init__(
        self,
        ranks: Communicator,
        parameters: Mapping[str, np.ndarray],
        options: object,
        servers: int,
        worker_timeout: float,
        more: str = "",
    ) -> None:
        name = type(self).__name__
        shapes = [f"{name} {x.dtype.name}{list(x.shape)}" for name, x in parameters.items()]
        ranks.agree(f"{name}({options!r}, servers={servers}{more}, {shapes})")
        if not is_whole(servers) or not 1 <= servers < ranks.size:
            raise ConfigError(
                f"servers={servers!r} of {ranks.size} ranks: there must be a server and a worker, "
                "as with mpirun -np 5 and servers=1"
            )
        if not is_number(worker_timeout) or not worker_timeout > 0:
            raise ConfigError(f"worker_timeout={worker_timeout!r} must be seconds, more than 0")
        self.comm, self.servers = ranks.duplicate(name), servers
        self.worker_timeout = float(worker_timeout)
        self.is_server = ranks.rank < servers
        self.rank, self.size = ranks.rank - servers, ranks.size - servers
        self._box, self._early, self._tag = Mailbox(self.comm), set[int](), tag_of(options)
        self.parameters = {name: np.array(x, order="C") for name, x in parameters.items()}
        for tensor, x in self.parameters.items():
            bytes_of_all = broadcast(ranks.channel(), x.reshape(-1).view(np.uint8), 0)
            ranks.run(f"{name}(), parameter {tensor!r}", bytes_of_all)

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self._links)

    @property
    def bytes_received(self) -> int:
        return sum(link.bytes_received for link in self._links)

    def _assemble(self) -> None:
        """Take over what the links have received."""

    @property
    def is_over(self) -> bool:
        """Whether the servers have ended: in the end, or without this worker."""
        return any(link.is_over for link in self._links)

    def stats(self) -> list[ServerStats]:
        """Return what each server has counted, on every rank, behind the ``with`` statement."""
        found = [link.stats for link in self._links]
        if any(each is None for each in found):
            raise ConfigError("stats() has its numbers from the end: call it behind the with")
        return [each for each in found if each is not None]

    # -- workers ------------------------------------------------------------------------------

    def batches(self, data: Iterable[T]) -> Iterator[T]:
        """Yield from ``data`` on workers, as long as there are servers; nothing on servers."""
        if not self.is_server:
            for batch in data:
                if self.is_over:
                    return
                yield batch

    def _wait(self, *, until_end: bool) -> None:
        """Wait for a reply of every server, or for the last."""
        self.comm.check()
        missing = {server for server, link in enumerate(self._links) if not link.is_over}
        heard = dict.fromkeys(missing, time.monotonic())
        while missing:
            frames = self._box.arrived()
            for rank, frame in frames:
                if rank >= self.servers:  # that has seen the end before this server
                    self._early.add(rank)
                    continue
                link = self._links[rank]
                if link.receive(frame) and (link.is_over or not until_end):
                    missing.discard(rank)
                heard[rank] = time.monotonic()
            if not frames and missing:
                self._box.nap()
                longest = min(missing, key=heard.__getitem__)
                if time.monotonic() - heard[longest] > self.comm.timeout:
                    problem = (
                        f"rank {self.comm.rank}: no sign of life from the parameter server on rank "
                        f"{longest} for {self.comm.timeout:g} s"
                    )
                    self.comm.give_up(problem, [self._box])
                    raise CollectiveTimeout(problem)

    # -- servers ------------------------------------------------------------------------------

    def _serve(self) -> None:
        server = self._server
        beat = time.monotonic()
        everyone = range(self.size)
        patience = Patience(everyone, self.worker_timeout, self.comm.timeout, beat)
        while not server.is_over:
            frames = self._box.arrived()
            for rank, frame in frames:
                if rank < self.servers:  # has ended before this one
                    self._links[rank].receive(frame)
                    continue
                worker = rank - self.servers
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
                        self._box.send(frame, worker + self.servers)
            if not frames:
                self._box.nap()
        last = server.end()
        for rank in range(self.comm.size):
            if rank != self.comm.rank:
                self._box.send(last, rank)
        self._links[self.comm.rank].receive(last)

    def _reply(self, replies: Iterable[Reply], patience: Patience) -> None:
        for worker, reply in replies:
            self._box.send(reply, worker + self.servers)
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
        for server, link in enumerate(self._links):
            if not link.is_over:
                self._box.send(link.leave(failed=error is not None), server)
        self._finish()

    def _finish(self) -> None:
        """Wait for the last parameters."""
        self._wait(until_end=True)
        self._assemble()
        found = self.stats()
        gone = {worker + self.servers for each in found for worker in each.lost}
        _until_left(self._box, gone)
        if gone or any(each.failed for each in found):
            atexit.register(_end_together, self._box, self._early, self._tag, gone)


def _until_left(box: Mailbox, gone: Collection[int]) -> None:
    deadline = time.monotonic() + box.comm.timeout
    while not box.has_left(gone) and time.monotonic() < deadline:
        box.nap()


def _end_together(box: Mailbox, early: set[int], tag: int, gone: set[int]) -> None:
    """Wait until all ranks that are left are about to end: launchers end a job when the first of
    its processes ends in an unusual way.  With ranks gone, ``MPI_Finalize`` would never end."""
    comm = box.comm
    here = [rank for rank in range(comm.size) if rank not in gone]
    done, deadline = encode(ServerMessage(MessageKind.DONE), tag), time.monotonic() + comm.timeout
    if comm.rank in here:  # a rank that was taken for lost lives, but nobody counts on it
        is_first = comm.rank == here[0]
        others, missing = here[1:] if is_first else here[:1], set(here) - {comm.rank} - early
        if not is_first:
            box.send(done, here[0])
            missing = set(here[:1])
        while missing and time.monotonic() < deadline:
            missing -= {rank for rank, _ in box.arrived()}
            box.nap()
        for rank in others if is_first else ():
            box.send(done, rank)
        _until_left(box, gone)
    if gone:
        time.sleep(0.5)  # the others are about to come here
        sys.stdout.flush()
        sys.stderr.flush()
        logging.shutdown()
        os._exit(1)
