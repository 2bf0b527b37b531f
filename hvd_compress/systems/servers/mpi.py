"""Servers over MPI, on the first rank; the others compute gradients, or take steps of their own: a
parameter server, and asynchronous Leader SGD."""

from __future__ import annotations

import atexit
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
from mpi4py import MPI

from hvd_compress.config import build, check_seed, is_number
from hvd_compress.errors import CollectiveTimeout, ConfigError, UnsupportedError
from hvd_compress.mpi.collectives.payloads import broadcast
from hvd_compress.mpi.transport import notes
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.mailbox import Mailbox
from hvd_compress.mpi.transport.nodes import nodes_of
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.leader_sgd import LeaderSGD
from hvd_compress.systems.servers.leaders import LeaderLink, LeaderServer
from hvd_compress.systems.servers.messages import (
    MessageKind,
    Reply,
    ServerEnd,
    ServerMessage,
    ServerStats,
    WorkerEnd,
    encode,
)
from hvd_compress.systems.servers.optimizers import SGD, ServerOptimizer
from hvd_compress.systems.servers.patience import Patience
from hvd_compress.systems.servers.server import Link, Rules, Server
from hvd_compress.times import end_at_once

logger = logging.getLogger("hvd_compress")
T = TypeVar("T")
S = TypeVar("S", bound="Serving")
#: seconds between two looks at which workers have ended their programs
_LOOK = 1.0


class Serving:
    """The base of systems whose first rank serves; making one is a collective.  Subclasses set
    ``_server`` there, and ``_link`` on all ranks; they are ``called`` by a name in errors.

    Args:
        ranks: all of them.
        parameters: by name; all ranks begin with copies of those of the first.
        options: those that ranks have to agree about, by their text.
        worker_timeout: seconds after which others go on without a silent worker; see
            :class:`hvd_compress.systems.servers.patience.Patience`.
    """

    called: ClassVar[str]
    _server: ServerEnd
    _link: WorkerEnd

    def __init__(
        self,
        ranks: Communicator,
        parameters: Mapping[str, np.ndarray],
        options: object,
        worker_timeout: float,
    ) -> None:
        call = self.called
        shapes = [f"{name} {x.dtype.name}{list(x.shape)}" for name, x in parameters.items()]
        ranks.agree(f"{call}({options!r}, {shapes})")
        if ranks.size < 2:
            raise ConfigError(
                f"{call} on 1 rank: there must be a server and a worker, as with mpirun -np 5"
            )
        if not is_number(worker_timeout) or not worker_timeout > 0:
            raise ConfigError(f"worker_timeout={worker_timeout!r} must be seconds, more than 0")
        self.comm = ranks.duplicate(call)
        self.worker_timeout = float(worker_timeout)
        self.is_server = ranks.rank == 0
        self.rank, self.size = ranks.rank - 1, ranks.size - 1
        self._box = Mailbox(self.comm)
        self._begin = {name: np.array(x, order="C") for name, x in parameters.items()}
        for name, x in self._begin.items():
            bytes_of_all = broadcast(ranks.channel(), x.reshape(-1).view(np.uint8), 0)
            ranks.run(f"{call}(), parameter {name!r}", bytes_of_all)

    @property
    def parameters(self) -> Arrays:
        return self._link.parameters

    @property
    def bytes_sent(self) -> int:
        return self._link.bytes_sent

    @property
    def is_over(self) -> bool:
        """Whether the server has ended: in the end, or without this worker."""
        return self._link.is_over

    def stats(self) -> ServerStats:
        """Return what the server has counted, on every rank, after the ``with`` statement."""
        if self._link.stats is None:
            raise ConfigError("stats() has its numbers from the end: call it after the with")
        return self._link.stats

    # -- workers ------------------------------------------------------------------------------

    def batches(self, data: Iterable[T]) -> Iterator[T]:
        """Yield from ``data`` on workers, as long as the server lives; nothing on the server."""
        if not self.is_server:
            for batch in data:
                if self.is_over:
                    return
                yield batch

    def _check_step(self) -> None:
        if self.is_server or self.is_over:
            role = "rank 0 serves" if self.is_server else "the server has ended"
            raise ConfigError(f"{role} and takes no steps: loop over worker.batches(data)")

    def _wait(self, *, until_end: bool) -> None:
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
        beat = looked = time.monotonic()
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
            given_up = {
                worker: f"sent nothing for {seconds:.1f} s: the others go on without it "
                "(worker_timeout= says how long they wait)"
                for worker, seconds in patience.lost(server.active, server.waiting, now).items()
            }
            if now - looked > _LOOK:
                looked = now
                for rank in notes.ended(self.comm):
                    if rank - 1 in server.active:
                        given_up[rank - 1] = (
                            "ended its program outside of `with`: the others go on without it"
                        )
            for worker, reason in given_up.items():
                logger.warning("worker %d has %s", worker, reason)
                self._reply(server.lose(worker), patience)
            if now - beat > self.comm.timeout / 10:
                beat = now
                frame = encode(ServerMessage(MessageKind.BEAT))
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
        self._wait(until_end=True)
        found = self.stats()
        gone = {worker + 1 for worker in found.lost}
        _until_left(self._box, gone)
        if gone or found.failed:
            atexit.register(_end_together, self._box, gone)


def _until_left(box: Mailbox, gone: Collection[int]) -> None:
    deadline = time.monotonic() + box.comm.timeout
    while not box.has_left(gone) and time.monotonic() < deadline:
        box.nap()


def _end_together(box: Mailbox, gone: set[int]) -> None:
    """Wait until all remaining ranks are about to end.

    Launchers end a job when the first of its processes ends in an unusual way.  With ranks gone,
    ``MPI_Finalize`` would never end.
    """
    comm = box.comm
    here = [rank for rank in range(comm.size) if rank not in gone]
    done, deadline = encode(ServerMessage(MessageKind.DONE)), time.monotonic() + comm.timeout
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
        end_at_once(0.5)  # the others are about to come here


class ParameterServer(Serving):
    """A parameter server over MPI; making one is a collective::

        with mpi.ParameterServer(parameters, SGD(lr=0.1), mode="async") as worker:
            for batch in worker.batches(data):
                worker.step(gradients(worker.parameters, batch))

    Rank 0 serves inside the ``with`` statement, and gets no batches.  Workers need not take equally
    many steps.  After it, ``worker.parameters`` are the same on all ranks.

    Args:
        parameters: arrays by name, float32 or float64; all ranks get the values of rank 0.
        optimizer: steps on the server: a formula such as ``SGD(lr=0.1)``, the default, one of
            :mod:`hvd_compress.optimizers`, or an object with a method ``step``.
        worker_timeout: seconds after which the others go on without a silent worker.
        seed: of random numbers of compressions.
        comm: the ranks; ``None`` for all.
        rules: ``mode``, ``backup``, ``compression``: see :class:`.Rules`.

    >>> ParameterServer({"w": np.ones(2)}, comm=MPI.COMM_SELF)
    Traceback (most recent call last):
    hvd_compress.errors.ConfigError: ParameterServer on 1 rank: there must be a server and a ...
    """

    called = "ParameterServer"
    _link: Link

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        optimizer: Formula | ServerOptimizer | None = None,
        *,
        worker_timeout: float = 60.0,
        seed: int = 0,
        comm: MPI.Comm | Communicator | None = None,
        **rules: Any,
    ) -> None:
        more = ("worker_timeout", "seed", "comm")
        self.rules = build(Rules, rules, "ParameterServer", more)
        check_seed(seed)
        ranks = Communicator.of(comm)
        for name, x in parameters.items():
            if x.dtype not in (np.float32, np.float64):
                raise UnsupportedError(f"{name!r} is {x.dtype}: float32 or float64 are needed")
        super().__init__(ranks, parameters, (self.rules, f"seed={seed}"), worker_timeout)
        self.rules.check_workers(self.size)
        self._link = Link(self._begin, self.rank, self.rules, seed)
        if self.is_server:
            steps, everyone = SGD() if optimizer is None else optimizer, range(self.size)
            self._server = Server(self._begin, steps, everyone, self.rules, seed)

    @property
    def taken(self) -> bool:
        """Whether the server has used the last gradient."""
        return self._link.taken

    def step(
        self, gradients: Mapping[str, np.ndarray | None], rates: Sequence[float] = ()
    ) -> Arrays:
        """Send gradients by name, wait until this worker may go on, and return the parameters.

        Args:
            gradients: those at ``parameters``; ``None`` for a parameter that has none, which stays
                as it is if no worker has one.
            rates: the learning rate of each group of parameters; none for the optimizer's own.
        """
        self._check_step()
        self._box.send(self._link.push(gradients, rates), 0)
        self._wait(until_end=False)
        return self.parameters


class AsynchronousLeaderSGD(Serving):
    """Leader SGD whose workers take steps at their own speed; making one is a collective::

        with mpi.AsynchronousLeaderSGD(parameters, local_every=4) as worker:
            for batch in worker.batches(data):
                loss, gradient = ...                      # at worker.parameters
                worker.step(a local step from them, loss)

    After the statement ``parameters`` are the mean of the workers' last ones, on all ranks.  See
    :mod:`hvd_compress.systems.servers.leaders`.

    Args:
        parameters: arrays by name; all ranks begin with those of rank 0.
        worker_timeout: seconds after which the others go on without a silent worker.
        comm: the ranks, of which the first serves; ``None`` for all.
        options: of :class:`hvd_compress.systems.rounds.LeaderSGD`.

    Raises: the errors of :class:`.ParameterServer`.

    >>> AsynchronousLeaderSGD({"w": np.ones(2)}, comm=MPI.COMM_SELF)
    Traceback (most recent call last):
    hvd_compress.errors.ConfigError: AsynchronousLeaderSGD on 1 rank: there must be a server and ...
    """

    called = "AsynchronousLeaderSGD"
    _link: LeaderLink

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        *,
        worker_timeout: float = 60.0,
        comm: MPI.Comm | Communicator | None = None,
        **options: Any,
    ) -> None:
        own = ("worker_timeout", "comm")
        self.method = build(LeaderSGD, options, "AsynchronousLeaderSGD", own)
        ranks = Communicator.of(comm)
        super().__init__(ranks, parameters, self.method, worker_timeout)
        # the workers of each node, by their numbers
        of_nodes = (tuple(r - 1 for r in node if r) for node in nodes_of(ranks).members)
        groups = tuple(filter(None, of_nodes))
        self._link = LeaderLink(self._begin, self.method)
        if self.is_server:
            self._server = LeaderServer(self._begin, range(self.size), self.method, groups)

    def step(self, parameters: Mapping[str, np.ndarray], loss: float) -> Arrays:
        """Report a local step and its loss, and return the parameters after the pull.

        Args:
            parameters: those after the local step.
            loss: of the batch, before it.
        """
        self._check_step()
        self._box.send(self._link.push(parameters, float(loss)), 0)
        self._wait(until_end=False)
        if not self.is_over:
            self._link.pull()
            if self.recovered:
                warnings.warn(
                    "NaN or Inf in the parameters of this worker: it goes on from those of its "
                    "leader",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self.parameters

    @property
    def recovered(self) -> bool:
        return self._link.recovered
