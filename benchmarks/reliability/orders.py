"""Training over a simulated MPI whose messages arrive in random orders, while ranks come late."""

from __future__ import annotations

import functools
import random

import numpy as np

from benchmarks.reliability.frames import ROWS
from hvd_compress import mpi
from hvd_compress.backends import numpy as numpy_backend
from tests.simulated_mpi import Simulation

SHAPES = {"w1": (12, 10), "b1": (10,), "w2": (9, 20), "scale": (7,), "none": (0,)}
STEPS = 3
#: bytes of a bucket: all tensors alone, or some, or all together
BUCKETS = (1, 300, 10**9)


def trained(
    name: str, size: int, bucket_bytes: int, ranks_per_machine: int, order: str, seed: int
) -> list[list[bytes]]:
    """Return of each rank the bits of the directions of all steps.  Each has its tensors ready in
    an order of its own, as a backward pass may."""

    def rank() -> list[bytes]:
        reducer = mpi.Reducer(ROWS[name].method, bucket_bytes=bucket_bytes)
        reducer.set_epoch(3)
        me, found = reducer.engine.rank, []
        for step in range(STEPS):
            gradients = np.random.default_rng([me, step])
            turn = (step + me) % len(SHAPES)
            for tensor in [*SHAPES][turn:] + [*SHAPES][:turn]:
                shape = SHAPES[tensor]
                reducer.start(tensor, gradients.standard_normal(shape).astype(np.float32))
            done = reducer.finish()
            found += [numpy_backend.to_numpy(done[tensor]).tobytes() for tensor in SHAPES]
        return found

    simulation = Simulation(size, order, seed, ranks_per_machine=ranks_per_machine)
    return simulation.run(rank)


@functools.lru_cache(maxsize=1000)
def in_order(name: str, size: int, bucket_bytes: int, ranks_per_machine: int) -> list[bytes]:
    """Return what comes of it where messages arrive as they were sent."""
    return trained(name, size, bucket_bytes, ranks_per_machine, "first", 0)[0]


class Case:
    """One case: a method, how many ranks, and the order."""

    def __init__(self, name: str, draw: random.Random) -> None:
        size = draw.choice((2, 3, 3, 4, 5, 8))
        self.world = name, size, draw.choice(BUCKETS), draw.choice((1, 2, size))
        self.order, self.seed = (
            draw.choice(("last", "random", "random", "slow")),
            draw.randrange(2**31),
        )

    def __str__(self) -> str:
        return f"{self.world}, order {self.order}, {self.seed}"

    def outcome(self) -> str:
        """Return a word of the campaign; raise whatever else comes out."""
        for found in trained(*self.world, self.order, self.seed):
            if found != in_order(*self.world):
                raise AssertionError("the bits depend on the order in which messages arrive")
        return "same bits"


def names() -> list[str]:
    return list(ROWS)
