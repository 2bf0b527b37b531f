"""Arrays that differ by rank, and what must come of them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress import mpi
from hvd_compress.mpi.dense import ALGORITHMS

world = MPI.COMM_WORLD
FLOATS = ("float16", "float32", "float64")
#: ranks of a node: even and uneven nodes, a last one with fewer ranks; one node of few ranks
LAYOUTS = (2, 3, (world.size + 1) // 2, max(1, world.size - 1))
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def array(rank: int, n: int, dtype: str, seed: int = 0) -> np.ndarray:
    """The array that ``rank`` brings; every rank can make everyone's."""
    generator = np.random.default_rng([seed, rank, n])
    if "int" in dtype:
        return generator.integers(0, 100 // world.size, n, dtype)
    return generator.standard_normal(n).astype(dtype)


def arrays(n: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    return [array(rank, n, dtype, seed) for rank in range(world.size)]


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


def raises(error: type[BaseException], *words: str) -> Any:
    """``with raises(ConfigError, "dampening")``: the message must contain the words."""
    import pytest

    return pytest.raises(error, match="(?s)" + ".*".join(words))
