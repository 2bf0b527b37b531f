"""Decentralised methods over MPI: the bits of the simulation, and bytes to neighbours only."""

from __future__ import annotations

import numpy as np

from hvd_compress import mpi
from hvd_compress.systems import Coordinator
from hvd_compress.systems.graphs import (
    LEAD,
    Diffusion,
    ExactDiffusion,
    GradientTracking,
    mix,
    simulate,
)
from tests.mpi_scenarios.common import world

METHODS = (
    *(Diffusion("line"), ExactDiffusion("cycle"), LEAD("complete")),
    *(GradientTracking("one_peer"), GradientTracking("exponential")),
)


def the_bits_of_the_simulation() -> None:
    start = np.random.default_rng(0).standard_normal((world.size, 300)).astype(np.float32)
    engine = mpi.MpiEngine()

    def gradient(rank: int, x: np.ndarray, step: int) -> np.ndarray:
        return x - np.float32(rank + 1)

    for method in METHODS:
        expected = simulate(method, gradient, start, 5, 0.1)[world.rank]
        coordinator, x = Coordinator(method, engine), start[world.rank]
        for step in range(5):
            x = coordinator.before_step({"x": x})["x"]
            x = coordinator.after_step({"x": x - 0.1 * gradient(world.rank, x, step)})["x"]
        np.testing.assert_array_equal(x, expected)
    engine.close()


def bytes_go_to_neighbours_only() -> None:
    """One frame of 16 bytes and 1000 float32 to each, counted at the messages."""
    engine = mpi.MpiEngine()
    for topology in ("line", "cycle", "exponential", "one_peer"):
        network = Diffusion(topology).network(world.rank, world.size, 1)
        before = engine.comm.bytes_sent
        engine.start("mixing", mix(np.ones(1000, np.float32), network))
        _, total = engine.finish()["mixing"]
        assert engine.comm.bytes_sent - before == 4016 * len(network.targets)
        np.testing.assert_allclose(total, 1, rtol=1e-6)
    engine.close()
