"""Dense allreduce over mpi4py: every algorithm against MPI_Allreduce, large and small, in one run.

    python benchmarks/dense_allreduce.py                      # four ranks on this machine
    mpirun -np 8 -H node1:4,node2:4 python benchmarks/dense_allreduce.py
    sudo .venv/bin/python tests/cluster --hosts 4 --timeout 600 -- \\
        python benchmarks/dense_allreduce.py

The last command makes four hosts with links of 1 Gbit/s on this machine.  A sample is the time from
a barrier until the slowest rank has the sum.  The contenders take turns, in another order each
round, so that the machine's load hits all alike, and what ran before as well.

The columns are the median, the smallest and the largest sample, and the median as a multiple of
that of MPI_Allreduce, of the best row, and of the floor: 2 n (P - 1) / P bytes at the rate of a
link.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from hvd_compress.cli.options import parser_of
from hvd_compress.integrations.launch import under_mpirun

parser = parser_of(__doc__)
parser.add_argument("--bytes", type=int, default=102_000_000, help="of the large array")
parser.add_argument("--rounds", type=int, default=5, help="samples of each, large array")
parser.add_argument("--small", type=int, nargs="*", default=[8, 1024, 16384, 262144])
parser.add_argument("--small-rounds", type=int, default=100)
parser.add_argument("--gbit", type=float, default=1.0, help="rate of a link, for the floor")
parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
options = parser.parse_args()
under_mpirun(options.ranks)

from mpi4py import MPI

from hvd_compress import mpi
from hvd_compress.mpi.dense import ALGORITHMS

world = MPI.COMM_WORLD
#: checks are for the first steps of a training run, and have no place in what is timed
comm = mpi.Communicator(world, checks=0)


def contenders(x: np.ndarray, out: np.ndarray) -> dict[str, Callable[[], object]]:
    return {
        "MPI_Allreduce": lambda: world.Allreduce(x, out),
        **{
            name: lambda name=name: mpi.allreduce(x, algorithm=name, out=out, comm=comm)
            for name in (*ALGORITHMS, "auto")
        },
    }


def measure(size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, by contender."""
    x = np.random.default_rng(world.rank).standard_normal(max(1, size // 4)).astype(np.float32)
    out = np.empty_like(x)
    calls = list(contenders(x, out).items())
    samples: dict[str, list[float]] = {name: [] for name, _ in calls}
    # One round more than is counted: the first one opens connections and touches memory.
    total = (rounds + 1) * len(calls)
    with tqdm(total=total, disable=world.rank != 0, ncols=90, desc=f"{size} bytes") as bar:
        for number in range(rounds + 1):
            for name, call in random.Random(number).sample(calls, len(calls)):
                world.Barrier()
                start = time.perf_counter()
                call()
                seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
                if number:
                    samples[name].append(seconds)
                bar.update()
    return samples


def show(size: int, samples: dict[str, list[float]], floor: float | None) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    base, best = medians["MPI_Allreduce"], min(medians.values())
    unit, name_of_unit = (1e3, "ms") if base > 0.01 else (1e6, "us")
    print(f"\n{size:,} bytes, {world.size} ranks", end="")
    print(f"; floor of the links {1e3 * floor:.0f} ms" if floor else "")
    print(f"{'':18} {'median':>10} {'min':>10} {'max':>10} {'x MPI':>7} {'x best':>7}", end="")
    print(f" {'x floor':>8}" if floor else "")
    for name, seconds in samples.items():
        line = f"{name:18}"
        for value in (medians[name], min(seconds), max(seconds)):
            line += f" {unit * value:7.0f} {name_of_unit}"
        line += f" {medians[name] / base:7.2f} {medians[name] / best:7.2f}"
        line += f" {medians[name] / floor:8.3f}" if floor else ""
        print(line)


def main() -> None:
    mpi.allreduce(np.ones(1, np.float32), comm=comm)  # measures the cost model
    results = [(options.bytes, measure(options.bytes, options.rounds))]
    results += [(size, measure(size, options.small_rounds)) for size in options.small]
    if world.rank:
        return
    print(MPI.Get_library_version().split(",")[0].splitlines()[0])
    for size, samples in results:
        floor = None
        if size >= 2**20:
            floor = 2 * size * (world.size - 1) / world.size / (options.gbit * 1e9 / 8)
        show(size, samples, floor)


if __name__ == "__main__":
    main()
