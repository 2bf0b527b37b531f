"""Add up vectors of which each rank has a few elements: sparse collectives beside the dense one.

    python -m mpi_examples.sparse_allgather
    python -m mpi_examples.sparse_allgather --ranks 8 --density 0.01 --common 0.9
    mpirun -np 4 python -m mpi_examples.sparse_allgather

First a vector of 12 elements, to look at; then a long one, with the bytes that each way sends.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from hvd_compress.integrations.launch import under_mpirun
from mpi_examples.study import check_counts


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    parser.add_argument("--elements", type=int, default=1_000_000, help="of the long vector")
    parser.add_argument("--density", type=float, default=0.001, help="part that each rank has")
    parser.add_argument(
        "--common", type=float, default=0.5, help="part of that at the same places on all ranks"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    check_counts(parser, options, "ranks", "elements")
    for name in ("density", "common"):
        if not 0 <= getattr(options, name) <= 1:
            parser.error(f"--{name} must be 0 to 1")
    return options


options = arguments()
under_mpirun(options.ranks)

from hvd_compress import Sparse, mpi

comm = mpi.Communicator(checks=0)  # which would count among the bytes


def few_of(n: int, k: int, common: int) -> Sparse:
    """``k`` of ``n`` elements, ``common`` of them at places that all ranks choose."""
    places = np.random.default_rng(options.seed).permutation(n)
    mine = np.random.default_rng([options.seed, comm.rank])
    own = mine.choice(places[common:], k - common, replace=False)
    indices = np.sort(np.concatenate([places[:common], own]))
    # Eighths of small numbers: their sums are exact, in whatever order they are added.
    return Sparse(indices, mine.integers(1, 65, k).astype(np.float32) / 8)


def dense_of(sparse: Sparse, n: int) -> np.ndarray:
    dense = np.zeros(n, np.float32)
    dense[sparse.indices] = sparse.values
    return dense


def add_gathered(sparse: Sparse, n: int) -> np.ndarray:
    """What a sparse allgather is for: every rank has all entries, and does with them what it
    likes."""
    total = np.zeros(n, np.float32)
    for theirs in mpi.sparse_allgather(sparse, n, comm=comm):
        total[theirs.indices] += theirs.values
    return total


def look_at_a_short_one() -> None:
    n = 12
    mine = few_of(n, k=3, common=1)
    everyones = mpi.sparse_allgather(mine, n, comm=comm)
    reduced = mpi.sparse_allreduce(mine, n, comm=comm)
    if comm.rank == 0:
        for rank, theirs in enumerate(everyones):
            print(f"rank {rank:<2}", _row(dense_of(theirs, n)))
        print(f"{'sum':7}", _row(reduced.dense(n)))


def _row(values: np.ndarray) -> str:
    return "".join(f"{value:7.3f}" if value else "      ." for value in values)


def compare(n: int, k: int, common: int) -> None:
    mine = few_of(n, k, common)
    dense = dense_of(mine, n)

    def allreduce(algorithm: str, **form: str) -> Callable[[], np.ndarray]:
        def run() -> np.ndarray:
            return mpi.sparse_allreduce(mine, n, algorithm=algorithm, comm=comm, **form).dense(n)

        return run

    ways = {
        "dense: ring_allreduce": lambda: mpi.ring_allreduce(dense, comm=comm),
        "sparse_allgather": lambda: add_gathered(mine, n),
        "sparse_allreduce: allgather": allreduce("allgather"),
        "  recursive_doubling": allreduce("recursive_doubling"),
        "  split_allgather": allreduce("split_allgather"),
        "    packed indices": allreduce("split_allgather", indices="packed"),
        "    and float16 values": allreduce("split_allgather", indices="packed", values="float16"),
    }
    expected = comm.mpi.allreduce(dense)
    places = np.count_nonzero(expected)
    rows = []
    for name, way in ways.items():
        before = comm.bytes_sent
        total = way()
        found = (comm.bytes_sent - before, np.array_equal(total, expected))
        rows.append((name, *zip(*comm.mpi.allgather(found), strict=True)))
    if comm.rank != 0:
        return
    print(
        f"\n{comm.size} ranks have {k:,} of {n:,} elements each, float32, {common:,} at common "
        f"places; {places:,} places in all\n"
    )
    header = f"{'':28} {'sent by a rank':>15} {'by the busiest':>15} {'of dense':>9}  same sum"
    print(header)
    print("-" * len(header))
    base = np.mean(rows[0][1]) or 1
    for name, sent, same in rows:
        print(
            f"{name:28} {np.mean(sent):13,.0f} B {max(sent):13,} B {np.mean(sent) / base:9.2%}"
            f"  {'yes' if all(same) else 'NO'}"
        )


def main() -> None:
    look_at_a_short_one()
    k = round(options.elements * options.density)
    compare(options.elements, k, round(k * options.common))


if __name__ == "__main__":
    main()
