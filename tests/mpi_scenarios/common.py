"""Arrays that differ by rank, and what must come of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress import Compressor, mpi
from hvd_compress.engines import lockstep
from hvd_compress.mpi.collectives.dense import ALGORITHMS
from tests.scenarios import raises as raises
from tests.scenarios import refused as refused

world = MPI.COMM_WORLD
FLOATS = ("float16", "float32", "float64")
#: ranks of a node: even and uneven nodes, a last one with fewer ranks; one node of few ranks
LAYOUTS = (2, 3, (world.size + 1) // 2, max(1, world.size - 1))
SHAPES = {"w1": (40, 30), "b1": (30,), "w2": (30, 20), "b2": (20,), "one": (1,), "none": (0,)}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def array(rank: int, n: int, dtype: str, seed: int = 0) -> np.ndarray:
    """The array that ``rank`` brings; every rank can make everyone's."""
    generator = np.random.default_rng([seed, rank, n])
    if "int" in dtype:
        return generator.integers(0, 100 // world.size, n, dtype)
    return generator.standard_normal(n).astype(dtype)


def arrays(n: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    return [array(rank, n, dtype, seed) for rank in range(world.size)]


def gradients_of(
    rank: int, step: int, dtype: str = "float32", shapes: Mapping[str, tuple[int, ...]] = SHAPES
) -> dict[str, np.ndarray]:
    """Arrays of these shapes, by name."""
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def assert_same_everywhere(*values: Any) -> None:
    """All ranks hold the same bits."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(np.ascontiguousarray(value).tobytes())
    digests = world.allgather(digest.hexdigest())
    assert len(set(digests)) == 1, "ranks hold different bits"


def dense_algorithms() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every dense allreduce, with its name."""
    for name in ALGORITHMS:
        yield name, functools.partial(mpi.allreduce, algorithm=name)
    names = ("direct", "ring", "auto", "halving_doubling")
    for ranks_per_node, across in zip(LAYOUTS, names, strict=True):
        options = {"algorithm": across, "nodes": ranks_per_node}
        by_nodes = functools.partial(mpi.allreduce, **options)
        yield f"{across} across nodes of {ranks_per_node}", by_nodes


def follows_the_lockstep_world(
    method: Compressor,
    *,
    dtype: str = "float32",
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    tolerance: float = 0.0,
    momentum: float = 0.0,
    nesterov: bool = False,
    **options: Any,
) -> None:
    """Training of all ranks beside that of the lockstep world, in one bucket: the same bits, or
    numbers as near as ``tolerance``.  ``options`` are those of the reducer."""
    optimizer = {"momentum": momentum, "nesterov": nesterov}
    reducer = mpi.Reducer(method, **optimizer, **options)
    reference = lockstep.World(method, world.size)
    reference.epoch = 1
    reducer.set_epoch(1)

    def compare(found: np.ndarray, expected: np.ndarray, *where: Any) -> None:
        if tolerance:
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        else:
            assert found.tobytes() == expected.tobytes(), (method, *where)

    for step in range(3):
        everyones = [gradients_of(rank, step, dtype, shapes) for rank in range(world.size)]
        mine, names = everyones[world.rank], [*shapes]
        turn = (step + world.rank) % len(names)  # ready in another order on each rank
        for name in names[turn:] + names[:turn]:
            reducer.start(name, mine[name])
        directions = reducer.finish()
        outcomes = reference.exchange_all(everyones, **optimizer)[world.rank]
        for name, outcome in outcomes.items():
            assert directions[name].dtype == dtype
            compare(directions[name], outcome.direction, name, step)
            for key, value in outcome.state.items():
                compare(reducer.store.states[name][key], value, name, key)
        assert_same_everywhere(*(directions[name] for name in names))
    reducer.engine.abandon()
