"""Measurement of the times of collectives."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from hvd_compress.base import Sparse
from hvd_compress.mpi.collectives.cost_model import SPARSITY, CostModel, Points
from hvd_compress.mpi.collectives.dense import ALGORITHMS as DENSE
from hvd_compress.mpi.collectives.dense_running import reducing
from hvd_compress.mpi.collectives.payloads import gather
from hvd_compress.mpi.collectives.sparse import ALGORITHMS as SPARSE
from hvd_compress.mpi.collectives.sparse_running import prepare
from hvd_compress.mpi.transport.communicator import Communicator

#: bytes of the arrays for which the algorithms are timed, and the seconds of the fastest one after
#: which larger ones are not
_SIZES = (8, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LONG = 0.1
#: numbers of entries for which the sparse algorithms are timed
_COUNTS = (16, 256, 4096, 32768)
_CALL = "measuring the cost model"


def model_of(comm: Communicator) -> CostModel:
    """Return the model of a communicator, which the first call measures; this is a collective."""
    if comm.cost_model is None:
        comm.cost_model = measure(comm)
    return comm.cost_model


def measure(comm: MPI.Comm | Communicator | None = None, *, repeats: int = 5) -> CostModel:
    """Measure all algorithms at a few sizes.  This is a collective; it takes some seconds on
    1 Gbit/s and much less on faster networks.

    Each number is that of the slowest rank, and all ranks get the same numbers.

    Args:
        comm: the communicator; ``None`` for all ranks.
        repeats: how often each call is timed, or a multiple of it; medians count.
    """
    comm = Communicator.of(comm)
    if comm.size == 1:
        return CostModel(1)

    def dense(size: int) -> Callable[[str], object]:
        x = np.zeros(max(1, size // 4), np.float32)
        out = np.zeros_like(x)
        return lambda name: reducing(comm, _CALL, DENSE[name], x, "float32", out, "sum").wait()

    def sparse(k: int) -> Callable[[str], object]:
        n = SPARSITY * k
        places = np.arange(comm.rank % SPARSITY, n, SPARSITY)
        mine = Sparse(places, np.ones(k, np.float32))

        def call(name: str) -> object:
            form, brought, *_ = prepare(mine, n, comm, None, "int32", "sum")
            return comm.run(_CALL, SPARSE[name](comm.channel(), brought, form))

        return call

    def times(size: int) -> int:
        return 4 * repeats if size <= 1 << 16 else repeats if size <= 1 << 20 else 3

    return CostModel(
        comm.size,
        _timed(comm, list(DENSE), _SIZES, dense, times),
        _timed(comm, list(SPARSE), _COUNTS, sparse, lambda k: repeats),
    )


def _timed(
    comm: Communicator,
    names: Sequence[str],
    sizes: Sequence[int],
    call: Callable[[int], Callable[[str], object]],
    times: Callable[[int], int],
) -> dict[str, Points]:
    """Return the median seconds of ``call(size)(name)`` on its slowest rank, by name; ``times``
    says how often each is called."""
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for size in sizes:
        calling = call(size)
        samples: list[list[float]] = []
        for turn in range(times(size) + 1):  # the first one opens connections and touches memory
            row = []
            for i in range(len(names)):
                name = names[(turn + i) % len(names)]
                row.append((name, _seconds_of(functools.partial(calling, name), comm)))
            samples.append([seconds for _, seconds in sorted(row)])
        # A call takes as long as its slowest rank, in every round.
        slowest = _slowest(comm, np.ravel(samples[1:]))
        medians = np.median(np.reshape(slowest, (times(size), len(names))), axis=0).tolist()
        for name, seconds in zip(sorted(names), medians, strict=True):
            points[name].append((size, seconds))
        if min(medians) > _LONG and size != sizes[0]:
            break
    return {name: tuple(found) for name, found in points.items()}


def _seconds_of(call: Callable[[], object], comm: Communicator) -> float:
    """Return the seconds that a call takes, which begins on all ranks at once."""
    comm.run(_CALL, gather(comm.channel(), np.empty(0, np.uint8), equal_sizes=True))
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _slowest(comm: Communicator, mine: np.ndarray) -> list[float]:
    """Return, of every number, the largest of all ranks."""
    row = np.asarray(mine, np.float64).view(np.uint8)
    (rows,) = comm.run(_CALL, gather(comm.channel(), row, equal_sizes=True))
    return np.max([each.view(np.float64) for each in rows], axis=0).tolist()
