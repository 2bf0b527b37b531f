"""Sparse allreduce of a ResNet-50 gradient at density 0.001: time, and bytes at the interface.

    python benchmarks/sparse_allreduce.py                      # four ranks on this machine
    mpirun -np 8 -H node1:4,node2:4 python benchmarks/sparse_allreduce.py
    sudo .venv/bin/python tests/cluster --hosts 8 --timeout 600 -- \\
        python benchmarks/sparse_allreduce.py

The last command makes eight hosts with links of 1 Gbit/s on this machine; the column "interface" is
what came in at their network interfaces, headers included, the largest of all ranks.  Every rank
brings the 0.1 % largest of 25,557,032 normal numbers, in places of its own.  Only the allreduce is
timed, from a barrier until the slowest rank has the sum; the contenders take turns, in another
order each round.  Ok-Topk is the collective of the method of this name, without its choice and its
residual.  "x best" compares the median with that of the best exact algorithm that sends the same
indices and values.

The floor is that of coordinate pairs with 4 bytes each for index and value, 2 k (P - 1) / P words
received by every rank (Li and Hoefler, 2022).
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hvd_compress.cli.options import parser_of
from hvd_compress.integrations.launch import under_mpirun

parser = parser_of(__doc__)
parser.add_argument("--elements", type=int, default=25_557_032)
parser.add_argument("--density", type=float, default=0.001)
parser.add_argument("--rounds", type=int, default=7, help="samples of each")
parser.add_argument("--interface", default="eth0", help="whose bytes are counted, if it is there")
parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
options = parser.parse_args()
under_mpirun(options.ranks)

from mpi4py import MPI

from hvd_compress import Context, Sparse, mpi
from hvd_compress.meetings.ok_topk import Regions
from hvd_compress.mpi.sparse import ALGORITHMS as SPARSE

world = MPI.COMM_WORLD
comm = mpi.Communicator(world, checks=0)
engine = mpi.MpiEngine(comm)
n, k = options.elements, max(1, int(options.elements * options.density))
received_file = Path("/sys/class/net", options.interface, "statistics/rx_bytes")
gradient = np.random.default_rng(world.rank).standard_normal(n).astype(np.float32)


largest = np.argpartition(np.abs(gradient), n - k)[n - k :]


def chosen_in(step: int) -> Sparse:
    """Of another gradient in every step, which is shifted instead of drawn anew."""
    shift = 7919 * (step + 1) * (world.rank + 1)
    indices = np.sort((largest + shift) % n)
    return Sparse(indices, gradient[(indices - shift) % n])


class OkTopk:
    """The collective over many steps, which keeps its threshold."""

    def __init__(self, indices: str, values: str) -> None:
        self.wire = {"indices": indices, "values": values}
        self.threshold, self.steps = np.zeros(1, np.float32), 0

    def __call__(self, chosen: Sparse) -> None:
        context = Context(rank=engine.rank, size=engine.size, step=self.steps)
        regions = Regions(n, k, "float32", context, **self.wire)
        engine.start("sums", regions.largest_sums(*chosen, self.threshold))
        self.threshold = engine.finish()["sums"][2]
        self.steps += 1


class Contender:
    """A collective; those with the same text in ``exact`` make the same sum."""

    def __init__(self, name: str, reduce: Callable, exact: str = "") -> None:
        self.name, self.reduce, self.exact = name, reduce, exact
        self.seconds: list[float] = []
        self.payload: list[int] = []
        self.wire: list[int] = []

    def step(self, step: int, counted: bool) -> None:
        chosen = chosen_in(step)
        sent = comm.bytes_sent + engine.comm.bytes_sent
        world.Barrier()
        before = arrived()
        start = time.perf_counter()
        self.reduce(chosen)
        seconds = time.perf_counter() - start
        world.Barrier()
        wire = arrived() - before
        if counted:
            self.seconds.append(world.allreduce(seconds, MPI.MAX))
            everyone_sent = world.allreduce(comm.bytes_sent + engine.comm.bytes_sent - sent)
            self.payload.append(everyone_sent // world.size)
            self.wire.append(world.allreduce(wire, MPI.MAX))


def arrived() -> int:
    return int(received_file.read_text()) if received_file.exists() else 0


def contenders() -> list[Contender]:
    found = []
    for values in (None, "float16"):
        for indices in ("int32", "packed"):
            wire = f"{indices}, {values or 'float32'}"
            common = {"comm": comm, "values": values, "indices": indices}
            for algorithm in (*SPARSE, "auto"):
                if (values, indices) not in ((None, "int32"), ("float16", "packed")):
                    continue
                found.append(
                    Contender(
                        f"{algorithm} ({wire})",
                        lambda s, a=algorithm, c=common: mpi.sparse_allreduce(
                            s, n, algorithm=a, **c
                        ),
                        exact=wire,
                    )
                )
            found.append(Contender(f"Ok-Topk ({wire})", OkTopk(indices, values or "float32")))
    return found


def main() -> None:
    everyone = contenders()
    # Two rounds are not counted: connections open, and Ok-Topk finds its thresholds.
    total = (options.rounds + 2) * len(everyone)
    with tqdm(total=total, disable=world.rank != 0, ncols=90) as bar:
        for step in range(options.rounds + 2):
            for contender in random.Random(step).sample(everyone, len(everyone)):
                contender.step(step, counted=step >= 2)
                bar.update()
    if world.rank:
        return
    base = statistics.median(everyone[0].seconds)
    floor = 8 * k * (world.size - 1) / world.size
    dense = 2 * 4 * n * (world.size - 1) / world.size
    print(f"\n{n:,} elements, {k:,} chosen on each of {world.size} ranks; floor of pairs", end=" ")
    print(f"{floor / 1000:,.0f} kB received, of the dense array {dense / 1000:,.0f} kB")
    print(f"{'':34} {'median':>9} {'min':>9} {'max':>9} {'speed-up':>9} {'x best':>7}", end="")
    print(f" {'payload':>11} {'interface':>12}")
    best: dict[str, float] = {}
    for c in everyone:
        best[c.exact] = min(best.get(c.exact, math.inf), statistics.median(c.seconds))
    for c in everyone:
        ratio = f"{statistics.median(c.seconds) / best[c.exact]:7.2f}" if c.exact else "-"
        line = f"{c.name:34}"
        for value in (statistics.median(c.seconds), min(c.seconds), max(c.seconds)):
            line += f" {1e3 * value:6.1f} ms"
        wire = f"{statistics.median(c.wire) / 1000:9,.0f} kB" if received_file.exists() else "-"
        payload = statistics.median(c.payload) / 1000
        line += f" {base / statistics.median(c.seconds):8.2f}x {ratio:>7}"
        print(f"{line} {payload:8,.0f} kB {wire:>12}")


if __name__ == "__main__":
    main()
