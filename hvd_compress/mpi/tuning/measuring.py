"""Measurement of the constants of the cost model."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from hvd_compress.aggregators.sparse_vectors import add_up
from hvd_compress.base import Sparse
from hvd_compress.mpi.dense.native import native
from hvd_compress.mpi.transport.communicator import Communicator, others
from hvd_compress.mpi.transport.progress import Algorithm, Wait
from hvd_compress.mpi.transport.reduction import Reduction
from hvd_compress.mpi.tuning.cost_model import CostModel
from hvd_compress.wire import decode_sparse, encode_sparse

_SMALL = 8
#: throughput is that of so many messages, some of them in flight at once as in a large array
_CHUNK, _CHUNKS, _DEPTH = 512 * 1024, 8, 4
_NATIVE_SIZES = (8, 4096, 65536, 1 << 20, 1 << 22)
_ENTRIES = 10_000

#: (ranks to send to, ranks to receive from)
Pattern = tuple[list[int], list[int]]


def model_of(comm: Communicator) -> CostModel:
    """Return the model of a communicator, which the first call measures; this is a collective."""
    if comm.cost_model is None:
        comm.cost_model = measure(comm)
    return comm.cost_model


def measure(comm: MPI.Comm | Communicator | None = None, *, repeats: int = 5) -> CostModel:
    """Measure the constants.  This is a collective; it takes two seconds on 1 Gbit/s and much less
    on faster networks.

    Each constant is that of the slowest rank, and all ranks get the same numbers.
    """
    comm = Communicator.of(comm)
    if comm.size == 1:
        return CostModel(1, 0.0, 0.0, 0.0, 0.0)
    rank, size = comm.rank, comm.size
    partner = rank ^ 1
    ring: Pattern = ([(rank + 1) % size], [(rank - 1) % size])
    pair: Pattern = ([partner], [partner]) if partner < size else ([], [])
    fan: Pattern = (others(rank, size), others(rank, size))

    def seconds(make: Callable[[], list[Algorithm]], times: int) -> float:
        samples = []
        for _ in range(times + 1):  # the first one opens connections and touches memory
            comm.run("measuring, barrier", _exchange(comm, fan, 0))
            start = time.perf_counter()
            comm.run("measuring the cost model", *make(), depth=_DEPTH)
            samples.append(time.perf_counter() - start)
        return statistics.median(samples[1:])

    def throughput(pattern: Pattern) -> float:
        chunk = _CHUNK // max(1, len(pattern[0]))
        # As many as are in flight at once, so that the first touch of memory is not timed.
        rows = [np.zeros((len(pattern[1]) + 1, chunk), np.uint8) for _ in range(_CHUNKS)]
        return seconds(lambda: [_exchange(comm, pattern, chunk, r) for r in rows], repeats)

    local = [
        seconds(lambda: [_exchange(comm, ring, _SMALL)], 4 * repeats),
        seconds(lambda: [_exchange(comm, fan, _SMALL)], 4 * repeats),
        *(throughput(pattern) for pattern in (ring, pair, fan)),
        _seconds_to_add(),
        _seconds_to_merge(),
        *(seconds(functools.partial(_native, comm, n), repeats) for n in _NATIVE_SIZES),
    ]
    everyones = np.empty((size, len(local)))
    everyones[rank] = local
    comm.run("comparing measurements", _share(comm, everyones))
    alpha, one_fan, *times = everyones.max(axis=0).tolist()
    betas = [max(t - alpha, 0.0) / (_CHUNK * _CHUNKS) for t in times[:3]]
    return CostModel(
        size=size,
        alpha=alpha,
        beta=betas[0],
        beta_pair=betas[1],
        beta_fan=betas[2],
        gamma=times[3],
        merge=times[4],
        overhead=max(one_fan - alpha, 0.0) / (size - 2) if size > 2 else 0.0,
        native=tuple(zip(_NATIVE_SIZES, times[5:], strict=True)),
    )


def _exchange(
    comm: Communicator, pattern: Pattern, size: int, rows: np.ndarray | None = None
) -> Algorithm:
    """Send ``size`` bytes to each rank, and receive as many from each; ``rows`` are the buffers to
    receive in, and the last one is sent."""
    channel = comm.channel()
    to, sources = pattern
    if rows is None:
        rows = np.zeros((len(sources) + 1, size), np.uint8)
    messages = [channel.receive(row, peer) for row, peer in zip(rows, sources, strict=False)]
    messages += [channel.send(rows[-1], peer) for peer in to]
    yield Wait(messages, "measuring")


def _native(comm: Communicator, size: int) -> list[Algorithm]:
    x = np.zeros(max(1, size // 4), np.float32)
    return [native(comm.channel(), x, np.empty_like(x), Reduction("sum", "float32", comm.size))]


def _share(comm: Communicator, rows: np.ndarray) -> Algorithm:
    channel = comm.channel()
    peers = others(comm.rank, comm.size)
    messages = [channel.receive(rows[peer], peer) for peer in peers]
    messages += [channel.send(rows[comm.rank], peer) for peer in peers]
    yield Wait(messages, "comparing measurements")


def _median(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(6):
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples[1:])


def _seconds_to_add() -> float:
    """Return the seconds that adding one byte takes."""
    x, y = np.ones(_CHUNK // 4, np.float32), np.ones(_CHUNK // 4, np.float32)
    return _median(lambda: np.add(x, y, out=x)) / _CHUNK


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
