"""Dense allreduce over mpi4py: every algorithm against MPI_Allreduce, large and small, in one run.

    python benchmarks/dense_allreduce.py                      # four ranks on this machine
    mpirun -np 8 -H node1:4,node2:4 python benchmarks/dense_allreduce.py
    sudo .venv/bin/python tests/cluster --hosts 4 --timeout 600 -- \\
        python benchmarks/dense_allreduce.py

The last command makes four hosts with links of 1 Gbit/s on this machine.  A sample is the time from
a barrier until the slowest rank has the sum.  The columns are the median, the smallest and the
largest sample, and the median as a multiple of that of MPI_Allreduce, of the best row, and of the
floor: 2 n (P - 1) / P bytes at the rate of a link.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from hvd_compress.cli.options import parser_of
from hvd_compress.cli.tables import text_table
from hvd_compress.launch import under_mpirun

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
from turns import slowest, turns

from hvd_compress import mpi
from hvd_compress.mpi.collectives.dense import ALGORITHMS

world = MPI.COMM_WORLD
#: checks are for the first steps of a training run, and have no place in what is timed
comm = mpi.Communicator(world, checks=0)


def measured(size: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of the slowest rank, by contender."""
    x = np.random.default_rng(world.rank).standard_normal(max(1, size // 4)).astype(np.float32)
    out = np.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"MPI_Allreduce": lambda: world.Allreduce(x, out)}
    for name in (*ALGORITHMS, "auto"):
        calls[name] = lambda name=name: mpi.allreduce(x, algorithm=name, out=out, comm=comm)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    # The first round opens connections and touches memory.
    for number, name in turns([*calls], rounds + 1):
        milliseconds = 1000 * slowest(world, calls[name])
        if number:
            samples[name].append(milliseconds)
    return samples


def show(size: int, samples: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(own) for name, own in samples.items()}
    base, best = medians["MPI_Allreduce"], min(medians.values())
    floor = 2 * size * (world.size - 1) / world.size / (options.gbit * 1e6 / 8)
    rows = []
    for name, own in samples.items():
        times = (f"{value:.3f}" for value in (medians[name], min(own), max(own)))
        rows.append((name, *times, *(f"{medians[name] / x:.2f}" for x in (base, best, floor))))
    header = ("ms", "median", "min", "max", "x MPI", "x best", "x floor")
    print(f"\n{size:,} bytes, {world.size} ranks; floor of the links {floor:.3g} ms")
    print(text_table(header, rows))


def main() -> None:
    mpi.allreduce(np.ones(1, np.float32), comm=comm)  # measures the cost model
    results = {options.bytes: measured(options.bytes, options.rounds)}
    results |= {size: measured(size, options.small_rounds) for size in options.small}
    if world.rank == 0:
        print(MPI.Get_library_version().split(",")[0].splitlines()[0])
        for size, samples in results.items():
            show(size, samples)


if __name__ == "__main__":
    main()
