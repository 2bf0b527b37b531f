"""Asynchronous Leader SGD and elastic averaging over MPI, with a server on rank 0."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.config import build, check_whole
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.nodes import nodes_of
from hvd_compress.systems.base import all_finite
from hvd_compress.systems.rounds.groups import Groups, groups_of
from hvd_compress.systems.rounds.leader_sgd import LeaderSGD
from hvd_compress.systems.servers.leaders import LeaderLink, LeaderServer
from hvd_compress.systems.servers.messages import Arrays
from hvd_compress.systems.servers.mpi.parameter_server import ParameterServer
from hvd_compress.systems.servers.mpi.serving import Serving
from hvd_compress.systems.servers.optimizers import ElasticCentre, moved


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
        self.method, ranks = build(LeaderSGD, options), Communicator.of(comm)
        super().__init__(ranks, parameters, self.method, 1, worker_timeout)
        groups = self._groups(ranks)
        self._links = [LeaderLink(self.parameters, self.method)]
        if self.is_server:
            self._server = LeaderServer(self.parameters, range(self.size), self.method, groups)

    def _groups(self, ranks: Communicator) -> Groups:
        """Return the numbers of the workers of each group."""
        if self.method.groups is not None:
            return groups_of(self.method.groups, self.size)
        of_nodes = (tuple(r - 1 for r in node if r) for node in nodes_of(ranks).members)
        return tuple(filter(None, of_nodes))

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
