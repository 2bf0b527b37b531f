"""What a collective costs: latency, bytes and additions, measured where it runs.

The model is the usual one (Thakur, Rabenseifner, Gropp, 2005): a round costs ``alpha`` seconds, a
byte ``beta`` and adding a byte ``gamma``; every message beyond the first of a round costs the
processor ``overhead``.  P ranks, n bytes:

====================  ==================================================================
ring                  2 (P-1) alpha + 2 n (P-1)/P beta + n (P-1)/P gamma
halving_doubling      2 log2(P) alpha + the same
direct                2 alpha + 2 (P-2) overhead + the same
mpi                   not modelled but measured, between its points interpolated
====================  ==================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.errors import ConfigError
from hvd_compress.mpi.communicator import Communicator, others
from hvd_compress.mpi.work import Algorithm, Wait

#: merging a sparse entry takes about as long as adding so many dense ones
_MERGE = 100
_SMALL, _LARGE = 8, (64 * 1024, 1024 * 1024)
_NATIVE_SIZES = (8, 4096, 65536, 1 << 20, 1 << 22)


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Measured constants of one communicator; equal on all ranks, so that all choose alike.

    Attributes:
        size: number of ranks that it was measured on.
        alpha: seconds of a round with one small message out and one in.
        beta: seconds a byte, sending and receiving at once.
        gamma: seconds to add one byte of float32.
        overhead: seconds of one more message in the same round.
        native: (bytes, seconds) of MPI's own allreduce, ascending; valid for ``size`` ranks only.
    """

    size: int
    alpha: float
    beta: float
    gamma: float
    overhead: float
    native: tuple[tuple[int, float], ...] = ()

    def seconds(self, algorithm: str, n: int, *, size: int | None = None) -> float:
        """Of a dense allreduce of ``n`` bytes on ``size`` ranks (as measured if ``None``)."""
        p = self.size if size is None else size
        if p == 1:
            return 0.0
        if algorithm == "mpi":
            if p != self.size or not self.native:
                raise ConfigError("MPI's own allreduce is known for the measured ranks only")
            return _interpolate(self.native, n)
        share = (p - 1) / p
        transfer = 2 * n * share * self.beta
        adding = n * share * self.gamma
        if algorithm == "ring":
            rounds = 2 * (p - 1) * self.alpha
        elif algorithm == "direct":
            rounds = 2 * self.alpha + 2 * (p - 2) * self.overhead
        elif algorithm == "halving_doubling":
            rounds = 2 * (p.bit_length() - 1) * self.alpha
            if p & (p - 1):  # up to the largest block and down again, with half of the data
                rounds += 4 * self.alpha
                transfer += n * self.beta
        else:
            raise ConfigError(f"algorithm={algorithm!r} has no cost model")
        return rounds + transfer + adding

    def fastest(self, n: int, dtype: str = "float32") -> str:
        """The dense algorithm that is expected to be fastest for ``n`` bytes."""
        costs = {}
        for name in ("direct", "halving_doubling", "mpi", "ring"):
            if name == "mpi" and not self.native:
                continue
            # Partial sums of half precisions travel as float32, a part of the way or all of it.
            wide = dtype in ("float16", "bfloat16")
            factor = {"direct": 1.0, "mpi": 2.0}.get(name, 1.5) if wide else 1.0
            costs[name] = self.seconds(name, int(n * factor))
        return min(costs, key=lambda name: (costs[name], name))

    def sparse_seconds(
        self,
        algorithm: str,
        k: int,
        n: int,
        *,
        pair: float = 8,
        item: int = 4,
        size: int | None = None,
    ) -> float:
        """Of a sparse allreduce: ``k`` of ``n`` elements on each rank, ``pair`` bytes for an index
        with its value, ``item`` for a dense one; places are independent between ranks."""
        p = self.size if size is None else size
        if p == 1:
            return 0.0

        def union(ranks: int) -> float:
            return n * (1 - (1 - k / n) ** ranks) if n else 0.0

        def message(ranks: int) -> float:
            return min(pair * union(ranks), item * n)

        def merging(entries: float) -> float:
            return min(_MERGE * entries, 10 * n) * 4 * self.gamma

        fan = 2 * (self.alpha + (p - 2) * self.overhead)  # sizes go ahead of all messages
        if algorithm == "allgather":
            return fan + pair * k * (p - 1) * self.beta + merging(k * p)
        if algorithm == "recursive_doubling":
            steps = [1 << step for step in range(p.bit_length() - 1)]
            rounds, moved = len(steps), sum(map(message, steps))
            if p & (p - 1):
                rounds, moved = rounds + 2, moved + pair * k + message(p)
            adding = sum(merging(2 * union(ranks)) for ranks in steps)
            return 2 * rounds * self.alpha + moved * self.beta + adding
        if algorithm in ("split_allgather", "ok_topk"):
            sums = message(p) if algorithm == "split_allgather" else pair * k
            moved = (pair * k + sums) * (p - 1) / p
            return 2 * fan + moved * self.beta + merging(k) + sums * self.gamma
        raise ConfigError(f"algorithm={algorithm!r} has no cost model")

    def fastest_sparse(self, k: int, n: int, *, pair: float = 8, item: int = 4) -> str:
        """The sparse algorithm that is expected to be fastest, of those that lose nothing."""
        names = ("allgather", "recursive_doubling", "split_allgather")
        costs = {name: self.sparse_seconds(name, k, n, pair=pair, item=item) for name in names}
        return min(costs, key=lambda name: (costs[name], name))

    def save(self, path: str | Path) -> None:
        """As JSON, for runs that shall not measure again."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """What :meth:`save` wrote."""
        values = json.loads(Path(path).read_text())
        values["native"] = tuple((int(n), float(s)) for n, s in values["native"])
        return cls(**values)


def of(comm: Communicator) -> CostModel:
    """The model of a communicator, measured when it is first needed: a collective."""
    if comm.cost_model is None:
        comm.cost_model = measure(comm)
    return comm.cost_model


def measure(comm: MPI.Comm | Communicator | None = None, *, repeats: int = 5) -> CostModel:
    """Measure the constants: a collective, a fraction of a second on 1 Gbit/s.

    The slowest rank counts, and all ranks get the same numbers.
    """
    comm = Communicator.of(comm)
    if comm.size == 1:
        return CostModel(1, 0.0, 0.0, 0.0, 0.0)

    def timed(algorithm: Callable[[], Algorithm], times: int) -> float:
        samples = []
        for _ in range(times + 1):
            comm.run("measuring a barrier", _fan(comm, 0))
            start = time.perf_counter()
            comm.run("measuring the cost model", algorithm())
            samples.append(time.perf_counter() - start)
        return statistics.median(samples[1:])

    local = [timed(functools.partial(_shift, comm, _SMALL), 4 * repeats)]
    local += [timed(functools.partial(_shift, comm, size), repeats) for size in _LARGE]
    local.append(timed(functools.partial(_fan, comm, _SMALL), 4 * repeats))
    local += [timed(functools.partial(_native, comm, size), repeats) for size in _NATIVE_SIZES]
    local.append(_seconds_to_add(_LARGE[1]))
    measured = np.empty((comm.size, len(local)))
    measured[comm.rank] = local
    comm.run("comparing measurements", _share(comm, measured))
    alpha, middle, large, fan, *native, adding = measured.max(axis=0).tolist()
    return CostModel(
        size=comm.size,
        alpha=alpha,
        beta=max(large - middle, 0.0) / (_LARGE[1] - _LARGE[0]),
        gamma=adding / _LARGE[1],
        overhead=max(fan - alpha, 0.0) / (comm.size - 2) if comm.size > 2 else 0.0,
        native=tuple(zip(_NATIVE_SIZES, native, strict=True)),
    )


def _shift(comm: Communicator, size: int) -> Algorithm:
    channel = comm.channel()
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    there, here = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    yield Wait([channel.receive(here, left), channel.send(there, right)], "shift")


def _fan(comm: Communicator, size: int) -> Algorithm:
    channel = comm.channel()
    there = np.zeros(size, np.uint8)
    messages = []
    for peer in others(comm.rank, comm.size):
        messages.append(channel.receive(np.zeros(size, np.uint8), peer))
        messages.append(channel.send(there, peer))
    yield Wait(messages, "fan")


def _native(comm: Communicator, size: int) -> Algorithm:
    from hvd_compress.mpi.native import native
    from hvd_compress.mpi.reduction import Reduction

    x = np.zeros(max(1, size // 4), np.float32)
    return native(comm.channel(), x, x, Reduction("sum", "float32", comm.size))


def _share(comm: Communicator, rows: np.ndarray) -> Algorithm:
    channel = comm.channel()
    messages = []
    for peer in others(comm.rank, comm.size):
        messages.append(channel.receive(rows[peer], peer))
        messages.append(channel.send(rows[comm.rank], peer))
    yield Wait(messages, "comparing measurements")


def _seconds_to_add(size: int) -> float:
    x, y = np.ones(size // 4, np.float32), np.ones(size // 4, np.float32)
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        np.add(x, y, out=x)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _interpolate(points: Sequence[tuple[int, float]], n: int) -> float:
    """Linear between the points; beyond the last as its last piece goes on."""
    sizes, seconds = zip(*points, strict=True)
    if n <= sizes[-1]:
        return float(np.interp(n, sizes, seconds))
    slope: Any = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
    return seconds[-1] + max(slope, 0.0) * (n - sizes[-1])
