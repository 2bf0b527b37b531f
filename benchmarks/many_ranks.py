"""Time and bytes of sparse methods over the number of ranks, in one run.

    sudo .venv/bin/python tests/cluster --hosts 16 --timeout 600 -- python benchmarks/many_ranks.py
    mpirun -np 8 -H node1:4,node2:4 python benchmarks/many_ranks.py --methods oktopk scalecom

Measured are whole steps of ``mpi.Reducer`` on one matrix, on the first 2, 4, 8 ... of the ranks,
while the others sleep.  Methods take turns, the slowest rank counts, and bytes are what a rank
sends and receives.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import statistics
import time

from hvd_compress.cli.options import parser_of
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes

parser = parser_of(__doc__)
add = parser.add_argument
add("--methods", nargs="+", metavar="METHOD", default=[
    "fp16", "topk:density=0.01", "topk:density=0.01,algorithm=split_allgather",
    "oktopk:density=0.01", "scalecom:density=0.01",
])  # fmt: skip
add("--elements", type=int, default=4_000_000, help="of the gradient, float32")
add("--rounds", type=int, default=7, help="that count, after four that do not")
add("--least", type=int, default=2, help="ranks to begin with")
add("--ranks", type=int, default=16, help="when started without mpirun")
options = parser.parse_args()
under_mpirun(options.ranks)

import numpy as np
from mpi4py import MPI

from hvd_compress import mpi

world = MPI.COMM_WORLD
_UNCOUNTED = 4


def measured(comm: MPI.Comm) -> list[tuple[str, float, float, float]]:
    """(method, median seconds, bytes sent, bytes received) of a step, the last two on average."""
    own = mpi.Communicator(comm, checks=0)
    random = np.random.default_rng(comm.rank)
    gradient = random.standard_normal((1000, options.elements // 1000), np.float32)
    reducers = {name: mpi.Reducer(name, comm=own) for name in options.methods}
    seconds: dict[str, list[float]] = {name: [] for name in reducers}
    for number in range(_UNCOUNTED + options.rounds):
        for turn in range(len(reducers)):
            name = options.methods[(number + turn) % len(reducers)]
            own_gradient = np.roll(gradient, number, 0)
            comm.Barrier()
            start = time.perf_counter()
            reducers[name].reduce({"g": own_gradient})
            taken = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if number >= _UNCOUNTED:
                seconds[name].append(taken)
    found = []
    for name, reducer in reducers.items():
        total = reducer.stats().total
        steps = _UNCOUNTED + options.rounds
        found.append((name, statistics.median(seconds[name]),
                      total.bytes_sent / steps, total.bytes_received / steps))  # fmt: skip
    return found


def main() -> None:
    width = max(map(len, options.methods))
    size = min(options.least, world.size)
    while size <= world.size:
        comm = world.Split(0 if world.rank < size else MPI.UNDEFINED)
        if comm != MPI.COMM_NULL:
            rows = measured(comm)
            comm.Free()
            if world.rank == 0:
                print(f"\n{size} ranks, {options.elements:,} elements", flush=True)
                for name, taken, sent, received in rows:
                    print(
                        f"  {name:<{width}} {1000 * taken:8.1f} ms"
                        f"  sent {human_bytes(sent):>10}  received {human_bytes(received):>10}",
                        flush=True,
                    )
        asleep = world.Ibarrier()  # the others' cores are for those that measure
        while not asleep.Test():
            time.sleep(0.02)
        size *= 2


if __name__ == "__main__":
    main()
