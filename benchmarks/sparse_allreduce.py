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

import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hvd_compress.cli.options import parser_of
from hvd_compress.cli.tables import text_table
from hvd_compress.launch import under_mpirun

parser = parser_of(__doc__)
parser.add_argument("--elements", type=int, default=25_557_032)
parser.add_argument("--density", type=float, default=0.001)
parser.add_argument("--rounds", type=int, default=7, help="samples of each")
parser.add_argument("--interface", default="eth0", help="whose bytes are counted, if it is there")
parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
options = parser.parse_args()
under_mpirun(options.ranks)

from mpi4py import MPI
from turns import slowest, turns

from hvd_compress import Context, Sparse, mpi
from hvd_compress.meetings.ok_topk import Regions
from hvd_compress.mpi.collectives.sparse import ALGORITHMS as SPARSE

world = MPI.COMM_WORLD
#: rounds in which connections open, and Ok-Topk finds its thresholds
_UNCOUNTED = 2
comm = mpi.Communicator(world, checks=0)
engine = mpi.MpiEngine(comm)
n, k = options.elements, max(1, int(options.elements * options.density))
received_file = Path("/sys/class/net", options.interface, "statistics/rx_bytes")
gradient = np.random.default_rng(world.rank).standard_normal(n).astype(np.float32)


largest = np.argpartition(np.abs(gradient), n - k)[n - k :]


def chosen_in(step: int) -> Sparse:
    """The entries of another gradient in every step, which is shifted instead of drawn again."""
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


def arrived() -> int:
    return int(received_file.read_text()) if received_file.exists() else 0


def contenders() -> dict[str, Callable[[Sparse], object]]:
    """The collectives by name; those with the same text in brackets make the same sum."""
    found: dict[str, Callable[[Sparse], object]] = {}
    for indices, values in (("int32", "float32"), ("packed", "float16")):
        common = {"comm": comm, "values": values, "indices": indices}
        for name in (*SPARSE, "auto"):
            found[f"{name} ({indices}, {values})"] = lambda chosen, name=name, common=common: (
                mpi.sparse_allreduce(chosen, n, algorithm=name, **common)
            )
    for indices in ("int32", "packed"):
        for values in ("float32", "float16"):
            found[f"Ok-Topk ({indices}, {values})"] = OkTopk(indices, values)
    return found


def main() -> None:
    calls = contenders()
    #: by name, of each step: seconds, bytes that a rank sent, and those that came in
    found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in calls}
    for step, name in turns([*calls], _UNCOUNTED + options.rounds):
        chosen, sent = chosen_in(step), comm.bytes_sent + engine.comm.bytes_sent
        world.Barrier()
        before = arrived()
        seconds = slowest(world, calls[name], chosen)
        wire = world.allreduce(arrived() - before, MPI.MAX)
        all_sent = world.allreduce(comm.bytes_sent + engine.comm.bytes_sent - sent)
        found[name].append((seconds, all_sent // world.size, wire))
    if world.rank:
        return
    samples = {name: [*zip(*own[_UNCOUNTED:], strict=True)] for name, own in found.items()}
    medians = {name: statistics.median(seconds) for name, (seconds, *_) in samples.items()}
    base = next(iter(medians.values()))
    rows = []
    for name, (seconds, payload, wire) in samples.items():
        times = (f"{1e3 * value:.1f}" for value in (medians[name], min(seconds), max(seconds)))
        exact = [other for other in medians if not other.startswith("Ok-Topk")]
        same = [medians[other] for other in exact if other.endswith(name.partition(" ")[2])]
        best = f"{medians[name] / min(same):.2f}" if name in exact else "-"
        kilobytes = [f"{statistics.median(x) / 1000:,.0f}" for x in (payload, wire)]
        if not received_file.exists():
            kilobytes[-1] = "-"
        rows.append((name, *times, f"{base / medians[name]:.2f}x", best, *kilobytes))
    floor, dense = (x * (world.size - 1) / world.size / 1000 for x in (8 * k, 8 * n))
    print(f"\n{n:,} elements, {k:,} chosen on each of {world.size} ranks; floor of pairs", end=" ")
    print(f"{floor:,.0f} kB received, of the dense array {dense:,.0f} kB")
    times = ("median, ms", "min", "max", "speed-up", "x best")
    print(text_table(("", *times, "payload, kB", "interface"), rows))


if __name__ == "__main__":
    main()
