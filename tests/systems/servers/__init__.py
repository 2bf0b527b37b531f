"""Tests of the parameter server."""

from hvd_compress.systems.servers.optimizers import SGD, ArrayOptimizer

#: steps of a worker, and seconds after which the jobs take a silent worker for lost
STEPS, TIMEOUT = 6, 1.5


class Recorder(ArrayOptimizer):
    """SGD that keeps the gradients of all ``steps``."""

    def __init__(self):
        super().__init__(SGD())
        self.steps = []

    def step(self, parameters, gradients, rates):
        self.steps.append(gradients)
        super().step(parameters, gradients, rates)
