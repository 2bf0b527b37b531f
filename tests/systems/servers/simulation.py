"""A server and its workers in one process, where gradients arrive in the order of a script."""

from hvd_compress.errors import ConfigError
from hvd_compress.systems.servers import Link, Server


class Simulation:
    """The real server and links, without a network: what arrives when is up to the caller.

    ``gradient(worker, parameters, step)`` returns arrays by name, ``None`` for one that is not
    there; a worker's steps count from 0.
    """

    def __init__(self, parameters, gradient, workers, rules, optimizer):
        self._gradient = gradient
        rules.check_workers(workers)
        self.server = Server(parameters, optimizer, range(workers), rules)
        self.links = [Link(parameters, worker, rules) for worker in range(workers)]
        self.steps = [0] * workers

    @property
    def parameters(self):
        return self.server.parameters

    def is_waiting(self, worker):
        return worker in self.server.waiting

    def run(self, arrivals):
        """Let the gradients of these workers arrive, one after the other."""
        for worker in arrivals:
            if self.is_waiting(worker):
                raise ConfigError(f"worker {worker} waits for others, and has no gradient to send")
            link = self.links[worker]
            gradients = self._gradient(worker, link.parameters, self.steps[worker])
            self.steps[worker] += 1
            self._deliver(self.server.receive(worker, link.push(gradients)))

    def leave(self, worker):
        self._deliver(self.server.receive(worker, self.links[worker].leave()))

    def lose(self, worker):
        self._deliver(self.server.lose(worker))

    def _deliver(self, replies):
        for worker, frame in replies:
            self.links[worker].receive(frame)
