"""Servers and workers in one process, where gradients arrive in the order of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.servers.messages import Reply
from hvd_compress.systems.servers.optimizers import ServerOptimizer
from hvd_compress.systems.servers.pieces import assembled, pieces_of, taken_from
from hvd_compress.systems.servers.rules import Rules
from hvd_compress.systems.servers.server import Link, Server

#: ``gradient(worker, parameters, step)``; a worker's steps count from 0, and ``None`` stands for a
#: gradient that is not there
Gradient = Callable[[int, Arrays, int], Mapping[str, np.ndarray | None]]


class Simulation:
    """The real servers and links, without a network: what arrives when is up to the caller.

    Args:
        parameters: the start, by name.
        gradient: ``gradient(worker, parameters, step)`` returns arrays by name, ``None`` for one
            that is not there; a worker's steps count from 0.
        workers: their number.
        rules: of the parameter server.
        optimizer: makes the optimizer of a server.
        servers: among which the parameters are divided.
        seed: of random numbers of compressions.
        momentum: for compressions that take it over.

    Attributes:
        servers: of class :class:`.Server`.
        links: by worker, one for each server.

    >>> start, gradient = {"x": np.ones(1)}, lambda worker, x, step: x
    >>> sim = Simulation(start, gradient, 2, Rules("async"), lambda: SGD(lr=0.1))
    >>> sim.run([0, 1])  # both gradients are those at 1
    >>> sim.parameters["x"]
    array([0.8])
    """

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        gradient: Gradient,
        workers: int,
        rules: Rules,
        optimizer: Callable[[], Formula | ServerOptimizer],
        *,
        servers: int = 1,
        seed: int = 0,
        momentum: float = 0.0,
    ) -> None:
        self._gradient = gradient
        self._start = {name: np.array(x) for name, x in parameters.items()}
        self._pieces = pieces_of(self._start, servers)
        own = [taken_from(self._start, pieces) for pieces in self._pieces]
        everyone = range(workers)
        rules.check_workers(workers)
        options: dict[str, Any] = {"seed": seed, "momentum": momentum}
        self.servers = [Server(x, optimizer(), everyone, rules, **options) for x in own]
        self.links = [[Link(x, w, rules, **options) for x in own] for w in everyone]
        self.steps = [0] * workers

    @property
    def parameters(self) -> Arrays:
        """The servers' parameters."""
        found = [server.parameters for server in self.servers]
        return assembled(self._start, found, self._pieces)

    def known(self, worker: int) -> Arrays:
        """Return the parameters as a worker has them."""
        found = [link.parameters for link in self.links[worker]]
        return assembled(self._start, found, self._pieces)

    def is_waiting(self, worker: int) -> bool:
        """Return whether a worker waits for a server."""
        return any(worker in server.waiting for server in self.servers)

    def run(self, arrivals: Iterable[int]) -> None:
        """Let the gradients of workers arrive, one after the other.

        Raises:
            ConfigError: a worker has to wait, and cannot have computed one.
        """
        for worker in arrivals:
            if self.is_waiting(worker):
                raise ConfigError(f"worker {worker} waits for others, and has no gradient to send")
            gradients = self._gradient(worker, self.known(worker), self.steps[worker])
            self.steps[worker] += 1
            for server, link, pieces in zip(
                self.servers, self.links[worker], self._pieces, strict=True
            ):
                frame = link.push(taken_from(gradients, pieces))
                self._deliver(server, server.receive(worker, frame))

    def leave(self, worker: int) -> None:
        """Let a worker leave."""
        for server, link in zip(self.servers, self.links[worker], strict=True):
            self._deliver(server, server.receive(worker, link.leave()))

    def lose(self, worker: int) -> None:
        """Let the servers give a worker up."""
        for server in self.servers:
            self._deliver(server, server.lose(worker))

    def _deliver(self, server: Server, replies: Sequence[Reply]) -> None:
        index = self.servers.index(server)
        for worker, frame in replies:
            self.links[worker][index].receive(frame)
