"""Servers over MPI, on the first rank; the others compute gradients, or take steps of their own: a
parameter server, and asynchronous Leader SGD."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.config import build, check_seed
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.nodes import nodes_of
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.rounds.groups import groups_of
from hvd_compress.systems.rounds.leader_sgd import LeaderSGD
from hvd_compress.systems.servers.leaders import LeaderLink, LeaderServer
from hvd_compress.systems.servers.mpi.serving import Serving
from hvd_compress.systems.servers.optimizers import SGD, ServerOptimizer
from hvd_compress.systems.servers.rules import Rules
from hvd_compress.systems.servers.server import Link, Server


class ParameterServer(Serving):
    """A parameter server over MPI; making one is a collective::

        with mpi.ParameterServer(parameters, SGD(lr=0.1), mode="async") as worker:
            for batch in worker.batches(data):
                worker.step(gradients(worker.parameters, batch))
        parameters = worker.parameters  # on all ranks, the last ones

    Rank 0 serves while it is in the ``with`` statement, and gets no batches.  After the statement
    all ranks have the same parameters.  Workers need not take equally many steps.  A worker that
    raises an error inside says so at once, and waits for the others before it ends.

    Args:
        parameters: arrays by name, float32 or float64, the same on all ranks or only meant on rank
            0, whose values all ranks get.
        optimizer: steps on the server: a formula, such as ``SGD(lr=0.1)``, which ``None``
            stands for, or one of :mod:`hvd_compress.optimizers`, or an object with a method
            ``step`` of its own.
        worker_timeout: seconds for which the others wait for a worker that sends nothing, or go on
            without it; a pause of all workers may be longer.
        seed: of random numbers of compressions.
        momentum, nesterov: for compressions that take momentum over; ``optimizer`` has none then.
        comm: the ranks; ``None`` for all.
        rules: options of :class:`hvd_compress.systems.servers.Rules`: ``mode``, ``backup``,
            ``compression``.

    Attributes:
        parameters: as this rank knows them.
        is_server: whether this rank serves.
        rank, size: the number of this worker, and of all workers.
        taken: whether the server has used the last gradient.
        bytes_sent, bytes_received: of this worker's messages.

    Raises:
        ConfigError: an option has a value that cannot be honoured.
        MismatchError: the ranks differ in options or in the shapes of their parameters.
        UnsupportedError: a parameter is neither float32 nor float64.

    A rank alone has nobody to serve:

    >>> ParameterServer({"w": np.ones(2)}, comm=MPI.COMM_SELF)
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: ParameterServer on 1 rank: there must be a server and a ...
    """

    _link: Link

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        optimizer: Formula | ServerOptimizer | None = None,
        *,
        worker_timeout: float = 60.0,
        seed: int = 0,
        momentum: float = 0.0,
        nesterov: bool = False,
        comm: MPI.Comm | Communicator | None = None,
        **rules: Any,
    ) -> None:
        more = ("worker_timeout", "seed", "momentum", "nesterov", "comm")
        self.rules = build(Rules, rules, "ParameterServer", more)
        check_seed(seed)
        ranks = Communicator.of(comm)
        for name, x in parameters.items():
            if x.dtype not in (np.float32, np.float64):
                raise UnsupportedError(f"{name!r} is {x.dtype}: float32 or float64 are needed")
        agreed = f", seed={seed}, momentum={momentum}, nesterov={nesterov}"
        super().__init__(ranks, parameters, self.rules, worker_timeout, agreed)
        self.taken = True
        self.epoch: float | None = None
        options: dict[str, Any] = {"seed": seed, "momentum": momentum, "nesterov": nesterov}
        self.rules.check_workers(self.size)
        self._link = Link(self.parameters, self.rank, self.rules, **options)
        if self.is_server:
            steps, everyone = SGD() if optimizer is None else optimizer, range(self.size)
            self._server = Server(self.parameters, steps, everyone, self.rules, **options)

    def set_epoch(self, epoch: float) -> None:
        """Announce the epoch, for compressions with schedules by epoch."""
        self.epoch = float(epoch)

    def step(
        self, gradients: Mapping[str, np.ndarray | None], rates: Sequence[float] = ()
    ) -> dict[str, np.ndarray]:
        """Send gradients by name, wait until this worker may go on, and return the parameters.

        Args:
            gradients: those at ``parameters``; ``None`` for a parameter that has none, which stays
                as it is if no worker has one.
            rates: the learning rate of each group of parameters; none for the optimizer's own.

        Raises:
            CollectiveTimeout: the server does not answer.
            PayloadError: a message is damaged.
        """
        if self.is_server:
            raise ConfigError("the server takes no steps: loop over worker.batches(data)")
        if self.is_over:
            raise ConfigError("the server has ended: loop over worker.batches(data)")
        if gradients.keys() != self.parameters.keys():
            raise ConfigError(
                f"gradients of {sorted(gradients)}, not of {sorted(self.parameters)}; None stands "
                "for one that is not there"
            )
        own = {name: g for name, g in gradients.items() if g is not None}
        self._box.send(self._link.push(own, rates, self.epoch), 0)
        self._wait(until_end=False)
        self._assemble()
        self.taken = self._link.taken
        return self.parameters


class AsynchronousLeaderSGD(Serving):
    """Leader SGD whose workers take steps at their own speed; making one is a collective::

        with mpi.AsynchronousLeaderSGD(parameters, local_every=4) as worker:
            for batch in worker.batches(data):
                loss, gradient = ...                      # at worker.parameters
                worker.step(a local step from them, loss)

    Behind the statement ``parameters`` are the mean of the workers' last ones, on all ranks.  See
    :mod:`hvd_compress.systems.servers.leaders`.

    Args:
        parameters: arrays by name; all ranks begin with those of rank 0.
        worker_timeout: seconds after which the others go on without a silent worker.
        comm: the ranks, of which the first serves; ``None`` for all.
        options: of :class:`hvd_compress.systems.rounds.LeaderSGD`.

    Attributes:
        parameters, is_server, rank, size: as of :class:`.ParameterServer`.
        recovered: whether the parameters of the last step had NaN or Inf, and those that were
            returned are a leader's.
        bytes_sent, bytes_received: of this worker's messages.

    Raises: what :class:`.ParameterServer` does.

    A rank alone has nobody to serve:

    >>> AsynchronousLeaderSGD({"w": np.ones(2)}, comm=MPI.COMM_SELF)
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: AsynchronousLeaderSGD on 1 rank: there must be a server and ...
    """

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
        if self.method.groups is not None:
            groups = groups_of(self.method.groups, self.size)
        else:  # the workers of each node, by their numbers
            of_nodes = (tuple(r - 1 for r in node if r) for node in nodes_of(ranks).members)
            groups = tuple(filter(None, of_nodes))
        self._link = LeaderLink(self.parameters, self.method)
        if self.is_server:
            self._server = LeaderServer(self.parameters, range(self.size), self.method, groups)

    def step(self, parameters: Mapping[str, np.ndarray], loss: float) -> Arrays:
        """Report a local step and its loss, and return the parameters after the pull.

        Args:
            parameters: those after the local step.
            loss: of the batch, before it.
        """
        if self.is_server or self.is_over:
            raise ConfigError("there is nobody to report to: loop over worker.batches(data)")
        self._box.send(self._link.push(parameters, float(loss)), 0)
        self._wait(until_end=False)
        if not self.is_over:
            self.parameters = self._link.pulled(parameters)
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
