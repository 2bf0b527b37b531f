"""A server and its workers in one process, where gradients arrive in the order of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.base import Formula
from hvd_compress.systems.base import Arrays
from hvd_compress.systems.servers.messages import Reply
from hvd_compress.systems.servers.optimizers import ServerOptimizer
from hvd_compress.systems.servers.rules import Rules
from hvd_compress.systems.servers.server import Link, Server

#: ``gradient(worker, parameters, step)``; a worker's steps count from 0, and ``None`` stands for a
#: gradient that is not there
Gradient = Callable[[int, Arrays, int], Mapping[str, np.ndarray | None]]


class Simulation:
    """The real server and links, without a network: what arrives when is up to the caller.

    Args:
        parameters: the start, by name.
        gradient: ``gradient(worker, parameters, step)`` returns arrays by name, ``None`` for one
            that is not there; a worker's steps count from 0.
        workers: their number.
        rules: of the parameter server.
        optimizer: of the server; or a formula to step by.
        seed: of random numbers of compressions.
        momentum: for compressions that take it over.

    Attributes:
        server: a :class:`.Server`.
        links: one for each worker.

    >>> start, gradient = {"x": np.ones(1)}, lambda worker, x, step: x
    >>> sim = Simulation(start, gradient, 2, Rules("async"), SGD(lr=0.1))
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
        optimizer: Formula | ServerOptimizer,
        *,
        seed: int = 0,
        momentum: float = 0.0,
    ) -> None:
        self._gradient = gradient
        everyone = range(workers)
        rules.check_workers(workers)
        options: dict[str, Any] = {"seed": seed, "momentum": momentum}
        self.server = Server(parameters, optimizer, everyone, rules, **options)
        self.links = [Link(parameters, w, rules, **options) for w in everyone]
        self.steps = [0] * workers

    @property
    def parameters(self) -> Arrays:
        """The server's parameters."""
        return self.server.parameters

    def is_waiting(self, worker: int) -> bool:
        """Return whether a worker waits for the server."""
        return worker in self.server.waiting

    def run(self, arrivals: Iterable[int]) -> None:
        """Let the gradients of workers arrive, one after the other.

        Raises:
            ConfigError: a worker has to wait, and cannot have computed one.
        """
        for worker in arrivals:
            if self.is_waiting(worker):
                raise ConfigError(f"worker {worker} waits for others, and has no gradient to send")
            link = self.links[worker]
            gradients = self._gradient(worker, link.parameters, self.steps[worker])
            self.steps[worker] += 1
            frame = link.push({name: g for name, g in gradients.items() if g is not None})
            self._deliver(self.server.receive(worker, frame))

    def leave(self, worker: int) -> None:
        """Let a worker leave."""
        self._deliver(self.server.receive(worker, self.links[worker].leave()))

    def lose(self, worker: int) -> None:
        """Let the server give a worker up."""
        self._deliver(self.server.lose(worker))

    def _deliver(self, replies: Iterable[Reply]) -> None:
        for worker, frame in replies:
            self.links[worker].receive(frame)
