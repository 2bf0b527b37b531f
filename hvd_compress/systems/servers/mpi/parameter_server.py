"""A parameter server over MPI: the first ranks are servers, the others compute gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.config import build, check_seed
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.servers.mpi.serving import Serving
from hvd_compress.systems.servers.optimizers import SGD, ServerOptimizer
from hvd_compress.systems.servers.pieces import assembled, gradients_of, pieces_of, taken_from
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
        self.rules = build(Rules, rules)
        check_seed(seed)
        ranks = Communicator.of(comm)
        for name, x in parameters.items():
            if x.dtype not in (np.float32, np.float64):
                raise UnsupportedError(f"{name!r} is {x.dtype}: float32 or float64 are needed")
        more = f"seed={seed}, momentum={momentum}, nesterov={nesterov}"
        super().__init__(ranks, parameters, self.rules, servers, worker_timeout, more)
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
            frame = link.push(gradients_of(gradients, self._pieces[server]), rates, self.epoch)
            self._box.send(frame, server)
        self._wait(until_end=False)
        self._assemble()
        self.taken = all(link.taken for link in self._links)
        return self.parameters

    def _assemble(self) -> None:
        found = [link.parameters for link in self._links]
        self.parameters = assembled(self.parameters, found, self._pieces)
