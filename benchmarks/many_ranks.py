"""Time and bytes of methods over the number of ranks and over elements, in one run.

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
from hvd_compress.cli.tables import text_table
from hvd_compress.launch import under_mpirun
from hvd_compress.stats import human_bytes

parser = parser_of(__doc__)
add = parser.add_argument
add("--methods", nargs="+", metavar="METHOD", default=[
    "fp16", "topk:density=0.01", "topk:density=0.01,algorithm=split_allgather",
    "oktopk:density=0.01", "scalecom:density=0.01",
])  # fmt: skip
add("--elements", type=int, nargs="+", default=[4_000_000], help="of the gradients, float32")
add("--rounds", type=int, default=7, help="that count, after four that do not")
add("--least", type=int, default=2, help="ranks to begin with")
add("--ranks", type=int, default=16, help="when started without mpirun")
options = parser.parse_args()
under_mpirun(options.ranks)

import numpy as np
from mpi4py import MPI
from turns import slowest, turns

from hvd_compress import mpi
from hvd_compress.methods import as_compressor

world = MPI.COMM_WORLD
_UNCOUNTED = 4


def measured(comm: MPI.Comm, elements: int) -> list[tuple[str, ...]]:
    """Return the row of each method: its median milliseconds, and what a rank sends and receives in
    a step on average."""
    own, reducers = mpi.Communicator(comm, checks=0), {}
    for name in options.methods:
        momentum = {"momentum": 0.9} if as_compressor(name).takes_momentum else {}
        reducers[name] = mpi.Reducer(name, comm=own, in_place=True, **momentum)
    gradient = np.random.default_rng(comm.rank).standard_normal((1000, elements // 1000), "float32")
    seconds: dict[str, list[float]] = {name: [] for name in reducers}
    for number, name in turns(options.methods, _UNCOUNTED + options.rounds):
        given = {"g": np.roll(gradient, number, 0)}
        seconds[name].append(slowest(comm, reducers[name].reduce, given))
    rows = []
    for name, reducer in reducers.items():
        total = reducer.stats().total
        sent, received = total.bytes_sent / total.steps, total.bytes_received / total.steps
        milliseconds = 1000 * statistics.median(seconds[name][_UNCOUNTED:])
        rows.append((name, f"{milliseconds:.1f}", human_bytes(sent), human_bytes(received)))
    return rows


def main() -> None:
    size = min(options.least, world.size)
    while size <= world.size:
        comm = world.Split(0 if world.rank < size else MPI.UNDEFINED)
        if comm != MPI.COMM_NULL:
            for elements in options.elements:
                table = text_table(("", "ms", "sent", "received"), measured(comm, elements))
                if world.rank == 0:
                    print(f"\n{size} ranks, {elements:,} elements\n{table}", flush=True)
            comm.Free()
        asleep = world.Ibarrier()  # the others' cores are for those that measure
        while not asleep.Test():
            time.sleep(0.02)
        size *= 2


if __name__ == "__main__":
    main()
