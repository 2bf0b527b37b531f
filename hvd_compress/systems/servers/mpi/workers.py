"""Servers over MPI, on the first ranks; the others compute gradients, or take steps of their own: a
parameter server, asynchronous Leader SGD and elastic averaging."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.config import build, check_seed, check_whole
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.nodes import nodes_of
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.base import Arrays, all_finite
from hvd_compress.systems.rounds.groups import groups_of
from hvd_compress.systems.rounds.leader_sgd import LeaderSGD
from hvd_compress.systems.servers.leaders import LeaderLink, LeaderServer
from hvd_compress.systems.servers.mpi.serving import Serving
from hvd_compress.systems.servers.optimizers import SGD, ElasticCentre, ServerOptimizer, moved
from hvd_compress.systems.servers.pieces import assembled, pieces_of, taken_from
from hvd_compress.systems.servers.rules import Rules
from hvd_compress.systems.servers.server import Link, Server


class ParameterServer(Serving):
    """A parameter server over MPI; making one is a collective::

        with mpi.ParameterServer(parameters, SGD(lr=0.1), mode="async") as worker:
            for batch in worker.batches(data):
                worker.step(gradients(worker.parameters, batch))
        parameters = worker.parameters  # on all ranks, the last ones

    The first ``servers`` ranks serve while they are in the ``with`` statement, and get no batches;
    the parameters are divided evenly among them.  Behind the statement all ranks have the same
    parameters.  Workers need not take equally many steps.  A worker that raises an error inside
    says so at once, and waits for the others before it ends.

    Args:
        parameters: arrays by name, float32 or float64, the same on all ranks or only meant on rank
            0, whose values all ranks get.
        optimizer: steps on the servers' pieces: a formula, such as ``SGD(lr=0.1)``, which ``None``
            stands for, or one of :mod:`hvd_compress.optimizers`, or an object with a method
            ``step`` of its own.
        servers: how many ranks serve.
        worker_timeout: seconds for which the others wait for a worker that sends nothing, or go on
            without it; a pause of all workers may be longer.
        seed: of random numbers of compressions.
        momentum, nesterov: for compressions that take momentum over; ``optimizer`` has none then.
        comm: the ranks; ``None`` for all.
        rules: options of :class:`hvd_compress.systems.servers.Rules`: ``mode``, ``backup``,
            ``staleness``, ``correction``, ``lam``, ``compression``, ``compression_down``.

    Attributes:
        parameters: as this rank knows them.
        is_server: whether this rank serves.
        rank, size: the number of this worker, and of all workers.
        taken: whether the servers have used the last gradient.
        bytes_sent, bytes_received: of this worker's messages.

    Raises:
        ConfigError: an option has a value that cannot be honoured.
        MismatchError: the ranks differ in options or in the shapes of their parameters.
        UnsupportedError: a parameter is neither float32 nor float64.

    A rank alone has nobody to serve:

    >>> ParameterServer({"w": np.ones(2)}, comm=MPI.COMM_SELF)
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: servers=1 of 1 ranks: there must be a server and a worker, ...
    """

    _links: list[Link]

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        optimizer: Formula | ServerOptimizer | None = None,
        *,
        servers: int = 1,
        worker_timeout: float = 60.0,
        seed: int = 0,
        momentum: float = 0.0,
        nesterov: bool = False,
        comm: MPI.Comm | Communicator | None = None,
        **rules: Any,
    ) -> None:
        more = ("servers", "worker_timeout", "seed", "momentum", "nesterov", "comm")
        self.rules = build(Rules, rules, "ParameterServer", more)
        check_seed(seed)
        ranks = Communicator.of(comm)
        for name, x in parameters.items():
            if x.dtype not in (np.float32, np.float64):
                raise UnsupportedError(f"{name!r} is {x.dtype}: float32 or float64 are needed")
        agreed = f", seed={seed}, momentum={momentum}, nesterov={nesterov}"
        super().__init__(ranks, parameters, self.rules, servers, worker_timeout, agreed)
        self.taken = True
        self.epoch: float | None = None
        self._optimizer = SGD() if optimizer is None else optimizer
        self._pieces = pieces_of(self.parameters, servers)
        own = [taken_from(self.parameters, pieces) for pieces in self._pieces]
        options: dict[str, Any] = {"seed": seed, "momentum": momentum, "nesterov": nesterov}
        self.rules.check_workers(self.size)
        self._links = [
            Link(x, self.rank, self.rules, server=f"rank {server}", **options)
            for server, x in enumerate(own)
        ]
        if self.is_server:
            everyone = range(self.size)
            mine = own[ranks.rank]
            self._server = Server(mine, self._optimizer, everyone, self.rules, **options)

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
            CollectiveTimeout: a server does not answer.
            PayloadError: a message is damaged.
        """
        if self.is_server:
            raise ConfigError("a server takes no steps: loop over worker.batches(data)")
        if self.is_over:
            raise ConfigError("the servers have ended: loop over worker.batches(data)")
        if gradients.keys() != self.parameters.keys():
            raise ConfigError(
                f"gradients of {sorted(gradients)}, not of {sorted(self.parameters)}; None stands "
                "for one that is not there"
            )
        for server, link in enumerate(self._links):
            frame = link.push(taken_from(gradients, self._pieces[server]), rates, self.epoch)
            self._box.send(frame, server)
        self._wait(until_end=False)
        self._assemble()
        self.taken = all(link.taken for link in self._links)
        return self.parameters

    def _assemble(self) -> None:
        found = [link.parameters for link in self._links]
        self.parameters = assembled(self.parameters, found, self._pieces)


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
    hvd_compress.errors.ConfigError: servers=1 of 1 ranks: there must be a server and a worker, ...
    """

    _links: list[LeaderLink]

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
        super().__init__(ranks, parameters, self.method, 1, worker_timeout)
        if self.method.groups is not None:
            groups = groups_of(self.method.groups, self.size)
        else:  # the workers of each node, by their numbers
            of_nodes = (tuple(r - 1 for r in node if r) for node in nodes_of(ranks).members)
            groups = tuple(filter(None, of_nodes))
        self._links = [LeaderLink(self.parameters, self.method)]
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
        (link,) = self._links
        self._box.send(link.push(parameters, float(loss)), 0)
        self._wait(until_end=False)
        if not link.is_over:
            self.parameters = link.pulled(parameters)
            if self.recovered:
                _warn("those of its leader")
        return self.parameters

    @property
    def recovered(self) -> bool:
        return self._links[0].recovered

    def _assemble(self) -> None:
        self.parameters = self._links[0].parameters


class AsynchronousEASGD(ParameterServer):
    """Elastic averaging whose workers meet the centre at their own speed; making one is a
    collective.  It is used as :class:`AsynchronousLeaderSGD`, without a loss.

    Every ``sync_every`` of its own steps a worker sends its x to the server, which has c::

        x = x - alpha (x - c)        c = c + alpha (x - c), with the old x and c

    Behind the statement ``parameters`` are the centre, on all ranks.  With Nesterov momentum in the
    local steps this is asynchronous EAMSGD.  A worker that meets the centre with NaN or Inf goes on
    from there, with a warning, and ``recovered`` says so.

    Args:
        parameters: arrays by name; all ranks begin with those of rank 0, as the centre does.
        sync_every: tau, the number of local steps between meetings.
        alpha: how far both move, a share of their distance.
        options: ``servers``, ``worker_timeout``, ``comm``, as of :class:`.ParameterServer`.

    Raises: what :class:`.ParameterServer` does.

    A rank alone has nobody to serve:

    >>> AsynchronousEASGD({"w": np.ones(2)}, comm=MPI.COMM_SELF)
    Traceback (most recent call last):
        ...
    hvd_compress.errors.ConfigError: servers=1 of 1 ranks: there must be a server and a worker, ...
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        *,
        sync_every: int = 10,
        alpha: float = 0.1,
        **options: Any,
    ) -> None:
        check_whole("sync_every", sync_every, 1)
        if not 0 < alpha < 1:
            raise ConfigError(f"alpha={alpha!r} must be between 0 and 1, for instance 0.1")
        if more := options.keys() - {"servers", "worker_timeout", "comm"}:
            raise ConfigError(f"AsynchronousEASGD has no option {sorted(more)[0]!r}")
        super().__init__(parameters, ElasticCentre(alpha), mode="async", **options)
        self.sync_every, self.alpha = sync_every, alpha
        self._steps = 0
        self.recovered = False

    def step(self, parameters: Mapping[str, np.ndarray], loss: float | None = None) -> Arrays:  # type: ignore[override]
        """Take over the parameters after a local step, meet the centre if that is due, and return
        those to go on with."""
        self._steps += 1
        own, self.recovered = {name: np.array(x) for name, x in parameters.items()}, False
        if self._steps % self.sync_every == 0:
            self.recovered = not all_finite(own)
            centre = super().step(own)
            if self.recovered:
                own = centre
                _warn("the centre")
            elif not self.is_over and self.taken:
                own = {name: moved(x, centre[name], self.alpha) for name, x in own.items()}
        self.parameters = own
        return own


def _warn(whither: str) -> None:
    warnings.warn(
        f"NaN or Inf in the parameters of this worker: it goes on from {whither}",
        RuntimeWarning,
        stacklevel=3,
    )
