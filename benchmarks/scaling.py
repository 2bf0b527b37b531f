"""The cost model: its error where it can be checked, and what it says of 64 and 256 ranks.

    python benchmarks/scaling.py                      # four ranks on this machine
    mpirun -np 8 -H node1:4,node2:4 python benchmarks/scaling.py
    sudo .venv/bin/python tests/cluster --hosts 8 --timeout 600 -- python benchmarks/scaling.py

Measures the model's constants on the ranks that it runs with, then dense and sparse allreduces of
several sizes, and compares; then predicts for ranks that are not here, with the same network.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from hvd_compress.integrations.launch import under_mpirun

parser = argparse.ArgumentParser(
    description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
)
parser.add_argument("--rounds", type=int, default=7, help="samples of each point")
parser.add_argument("--predict", type=int, nargs="*", default=[64, 256], help="numbers of ranks")
parser.add_argument("--elements", type=int, default=25_557_032, help="of the model to predict for")
parser.add_argument("--density", type=float, default=0.001)
parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
options = parser.parse_args()
under_mpirun(options.ranks)

from mpi4py import MPI

from hvd_compress import Sparse, mpi

world = MPI.COMM_WORLD
comm = mpi.Communicator(world, checks=0)
DENSE = ("ring", "halving_doubling", "direct", "mpi")
SPARSE = ("allgather", "recursive_doubling", "split_allgather")


def median_seconds(call: Callable[[], object]) -> float:
    samples = []
    for _ in range(options.rounds + 1):
        world.Barrier()
        start = time.perf_counter()
        call()
        samples.append(world.allreduce(time.perf_counter() - start, MPI.MAX))
    return statistics.median(samples[1:])


def random_places(k: int, n: int) -> Sparse:
    generator = np.random.default_rng(world.rank)
    indices = np.unique(generator.integers(0, n, k))
    return Sparse(indices, generator.standard_normal(len(indices)).astype(np.float32))


def measured(model: mpi.CostModel) -> list[tuple[str, str, float, float]]:
    """(algorithm, what, measured, predicted)."""
    points: list[tuple[str, str, Callable[[], object], float]] = []
    for size in (4096, 65536, 2**20, 2**23):
        x = np.ones(size // 4, np.float32)
        for name in DENSE:
            points.append(
                (
                    name,
                    f"{size:,} bytes",
                    lambda x=x, name=name: mpi.allreduce(x, algorithm=name, comm=comm),
                    model.seconds(name, size),
                )
            )
    n = options.elements
    for k in (n // 10_000, n // 1000, n // 100):
        sparse = random_places(k, n)
        for name in SPARSE:
            points.append(
                (
                    name,
                    f"{k:,} of {n:,}",
                    lambda s=sparse, name=name: mpi.sparse_allreduce(
                        s, n, algorithm=name, comm=comm
                    ),
                    model.sparse_seconds(name, k, n),
                )
            )
    found = []
    for name, what, call, predicted in tqdm(points, disable=world.rank != 0, ncols=90):
        found.append((name, what, median_seconds(call), predicted))
    return found


def main() -> None:
    model = mpi.measure(comm, repeats=options.rounds)
    points = measured(model)
    if world.rank:
        return
    print(f"\nmeasured on {model.size} ranks: alpha {1e6 * model.alpha:.0f} us,", end=" ")
    print(f"{8e-9 / model.beta:.2f} Gbit/s, adding {1e-9 / model.gamma:.1f} GB/s,", end=" ")
    print(f"{1e6 * model.overhead:.0f} us for one more message")
    print(f"\n{'algorithm':20} {'of':26} {'measured':>11} {'predicted':>11} {'error':>8}")
    for name, what, seconds, predicted in points:
        error = 100 * (predicted / seconds - 1)
        print(
            f"{name:20} {what:26} {1e3 * seconds:8.2f} ms {1e3 * predicted:8.2f} ms {error:7.0f}%"
        )
    errors = [abs(predicted / seconds - 1) for _, _, seconds, predicted in points]
    print(f"median error {100 * statistics.median(errors):.0f}%, largest {100 * max(errors):.0f}%")

    n, k = options.elements, int(options.elements * options.density)
    print(f"\npredicted on the same network, {n:,} float32, dense, and {k:,} of them on each rank")
    ranks = [model.size, *options.predict]
    print(f"{'':20} " + " ".join(f"{f'{p} ranks':>12}" for p in ranks))
    for name in DENSE[:3]:
        row = [1e3 * model.seconds(name, 4 * n, size=p) for p in ranks]
        print(f"{name:20} " + " ".join(f"{value:9.0f} ms" for value in row))
    for name in (*SPARSE, "ok_topk"):
        row = [1e3 * model.sparse_seconds(name, k, n, size=p) for p in ranks]
        print(f"{name:20} " + " ".join(f"{value:9.1f} ms" for value in row))


if __name__ == "__main__":
    main()
