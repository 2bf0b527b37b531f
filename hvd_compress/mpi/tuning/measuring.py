"""Measurement of the constants of the cost model."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from hvd_compress.base import Sparse
from hvd_compress.meetings.sparse_vectors import add_up
from hvd_compress.mpi.dense import ALGORITHMS as DENSE
from hvd_compress.mpi.dense.payloads import gather
from hvd_compress.mpi.dense.running import CHUNK, run
from hvd_compress.mpi.sparse import ALGORITHMS as SPARSE
from hvd_compress.mpi.sparse.running import reduce
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.mpi.tuning.cost_model import SPARSITY, CostModel, Points
from hvd_compress.wire import decode_sparse, encode_sparse

_SMALL = 8
#: throughput is that of so many messages, some of them in flight at once as in a large array
_CHUNKS, _DEPTH = 8, 4
#: bytes of the arrays for which the algorithms are timed, and the seconds of the fastest one after
#: which larger ones are not
_SIZES = (8, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_LONG = 0.1
#: numbers of entries for which the sparse algorithms are timed
_COUNTS = (16, 256, 4096, 32768)
_ENTRIES = 10_000

#: (ranks to send to, ranks to receive from)
Pattern = tuple[list[int], list[int]]


def model_of(comm: Communicator) -> CostModel:
    """Return the model of a communicator, which the first call measures; this is a collective."""
    if comm.cost_model is None:
        comm.cost_model = measure(comm)
    return comm.cost_model


def measure(comm: MPI.Comm | Communicator | None = None, *, repeats: int = 5) -> CostModel:
    """Measure the constants, and all algorithms at a few sizes.  This is a collective; it takes
    some seconds on 1 Gbit/s and much less on faster networks.

    Each number is that of the slowest rank, and all ranks get the same numbers.

    Args:
        comm: the communicator; ``None`` for all ranks.
        repeats: how often each call is timed, or a multiple of it; medians count.
    """
    comm = Communicator.of(comm)
    if comm.size == 1:
        return CostModel(1, 0.0, 0.0, 0.0)
    rank, size = comm.rank, comm.size
    partner = rank ^ 1
    ring: Pattern = ([(rank + 1) % size], [(rank - 1) % size])
    pair: Pattern = ([partner], [partner]) if partner < size else ([], [])
    fan: Pattern = (comm.peers, comm.peers)

    def seconds(make: Callable[[], list[Algorithm]], times: int) -> float:
        def call() -> object:
            return comm.run("measuring the cost model", *make(), depth=_DEPTH)

        # The first one opens connections and touches memory.
        return statistics.median([_seconds_of(call, comm) for _ in range(times + 1)][1:])

    def throughput(pattern: Pattern) -> float:
        chunk = CHUNK // max(1, len(pattern[0]))
        # As many as are in flight at once, so that the first touch of memory is not timed.
        rows = [np.zeros((len(pattern[1]) + 1, chunk), np.uint8) for _ in range(_CHUNKS)]
        return seconds(lambda: [_exchange(comm, pattern, chunk, r) for r in rows], repeats)

    local = [
        seconds(lambda: [_exchange(comm, ring, _SMALL)], 4 * repeats),
        seconds(lambda: [_exchange(comm, fan, _SMALL)], 4 * repeats),
        *(throughput(pattern) for pattern in (ring, pair, fan)),
        _seconds_to_merge(),
    ]
    alpha, one_fan, *times = _slowest(comm, local)
    betas = [max(t - alpha, 0.0) / (CHUNK * _CHUNKS) for t in times[:3]]
    return CostModel(
        size=size,
        alpha=alpha,
        beta=betas[0],
        beta_pair=betas[1],
        beta_fan=betas[2],
        merge=times[3],
        overhead=max(one_fan - alpha, 0.0) / (size - 2) if size > 2 else 0.0,
        points=_points(comm, repeats),
        sparse_points=_sparse_points(comm, repeats),
    )


def _exchange(
    comm: Communicator, pattern: Pattern, size: int, rows: np.ndarray | None = None
) -> Algorithm:
    """Send ``size`` bytes to each rank, and receive as many from each; ``rows`` are the buffers to
    receive in, and the last one is sent."""
    to, sources = pattern
    if rows is None:
        rows = np.zeros((len(sources) + 1, size), np.uint8)
    buffers = dict(zip(sources, rows, strict=False))
    yield comm.channel().exchange(buffers, dict.fromkeys(to, rows[-1]), "measuring")


def _points(comm: Communicator, repeats: int) -> dict[str, Points]:
    """Time every dense algorithm, as it is called, at every size."""

    def call(size: int) -> Callable[[str], object]:
        x = np.zeros(max(1, size // 4), np.float32)
        out = np.zeros_like(x)
        return lambda name: run(x, "sum", name, out, comm, chunk=CHUNK)

    def times(size: int) -> int:
        return 4 * repeats if size <= 1 << 16 else repeats if size <= 1 << 20 else 3

    return _timed(comm, list(DENSE), _SIZES, call, times)


def _sparse_points(comm: Communicator, repeats: int) -> dict[str, Points]:
    """Time every sparse algorithm, as it is called, at every number of entries."""

    def call(k: int) -> Callable[[str], object]:
        n = SPARSITY * k
        places = np.arange(comm.rank % SPARSITY, n, SPARSITY)
        mine = Sparse(places, np.ones(k, np.float32))
        return lambda name: reduce(mine, n, "sum", name, comm, indices="int32")

    return _timed(comm, list(SPARSE), _COUNTS, call, lambda k: repeats)


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
    checks, comm.checks = comm.checks, 0  # what is not compared later must not be now
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
        for name, seconds in zip(names, medians, strict=True):
            points[name].append((size, seconds))
        if min(medians) > _LONG and size != sizes[0]:
            break
    comm.checks = checks
    return {name: tuple(found) for name, found in points.items()}


def _seconds_of(call: Callable[[], object], comm: Communicator | None = None) -> float:
    """Return the seconds that a call takes, which begins on all ranks of ``comm`` at once."""
    if comm is not None:
        barrier = gather(comm.channel(), np.empty(0, np.uint8), equal_sizes=True)
        comm.run("measuring, barrier", barrier)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _slowest(comm: Communicator, mine: Sequence[float] | np.ndarray) -> list[float]:
    """Return, of every number, the largest of all ranks."""
    row = np.asarray(mine, np.float64).view(np.uint8)
    (rows,) = comm.run("comparing measurements", gather(comm.channel(), row, equal_sizes=True))
    return np.max([each.view(np.float64) for each in rows], axis=0).tolist()


def _median(call: Callable[[], object]) -> float:
    return statistics.median([_seconds_of(call) for _ in range(6)][1:])


def _seconds_to_merge() -> float:
    """Return the seconds that an entry takes: decode the vectors of two ranks, add them up, and
    encode one of that size."""
    n = 1000 * _ENTRIES
    values = np.ones(_ENTRIES, np.float32)
    frames = [encode_sparse(np.arange(i, n, 1000), values, n) for i in range(2)]

    def merge() -> None:
        parts = [decode_sparse(frame, n, "float32") for frame in frames]
        total = add_up([Sparse(at.astype(np.int64), what) for at, what in parts], n, "float32")
        assert isinstance(total, Sparse)
        encode_sparse(total.indices, total.values, n)

    return _median(merge) / (2 * _ENTRIES)
