"""Watch an allreduce at work: every message, who sends it, what is in it.

    python -m mpi_examples.allreduce_steps
    python -m mpi_examples.allreduce_steps --ranks 6 --algorithms ring halving_doubling direct
    mpirun -np 8 python -m mpi_examples.allreduce_steps --algorithms halving_doubling

The algorithms are those that training uses, and the messages really travel.  The vector is made so
that a sum tells what it consists of: element i of rank r is 2**r + i * 2**P on P ranks.  So the low
P bits of a sum are the ranks that are in it, and the rest tells which element it is.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.cli.options import parser_of, picture_file, positive
from hvd_compress.cli.tables import text_table
from hvd_compress.launch import under_mpirun

ALGORITHMS = ("ring", "halving_doubling", "direct")
ELEMENTS = 16  # of the vector, 8 bytes each


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=positive, default=4, help="when started without mpirun")
    parser.add_argument(
        "--algorithms",
        nargs="+",
        choices=ALGORITHMS,
        default=["ring", "halving_doubling"],
        metavar="NAME",
        help=f"of {', '.join(ALGORITHMS)}",
    )
    parser.add_argument("--output", type=picture_file, default=Path("results/allreduce_steps.png"))
    return parser.parse_args()


options = arguments()
under_mpirun(options.ranks)

import matplotlib.pyplot as plt

from hvd_compress.mpi import Communicator
from hvd_compress.mpi.collectives.dense_direct import direct
from hvd_compress.mpi.collectives.dense_halving_doubling import halving_doubling
from hvd_compress.mpi.collectives.dense_ring import ring
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.progress import Algorithm, Wait
from hvd_compress.mpi.transport.reduction import Reduction
from mpi_examples.report import save

FUNCTIONS = {"ring": ring, "halving_doubling": halving_doubling, "direct": direct}


class Stop(NamedTuple):
    """A place where an algorithm waits on one rank: what it sent before, and who must answer."""

    phase: str
    sent: list[tuple[int, np.ndarray]]
    sources: list[int]


class Message(NamedTuple):
    round: int
    phase: str
    sender: int
    receiver: int
    values: np.ndarray


class Recorder(Channel):
    """A channel that keeps a copy of all that it sends."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, comm.channel().tag)
        self.sent: list[tuple[int, np.ndarray]] = []

    def exchange(self, incoming: Any, outgoing: Any, *place: Any) -> Wait:
        self.sent += [(to, array.copy()) for to, array in outgoing.items()]
        return super().exchange(incoming, outgoing, *place)


def watch(algorithm: Algorithm, channel: Recorder, stops: list[Stop]) -> Iterator[Wait]:
    """The algorithm as it is: a generator of what it waits for."""
    for wait in algorithm:
        sources = [peer for peer, _, comes in wait.messages if comes]
        stops.append(Stop(wait.phase, channel.sent, sources))
        channel.sent = []
        yield wait


def in_rounds(stops_by_rank: list[list[Stop]]) -> list[Message]:
    """All ranks' messages in the rounds of a network on which each takes exactly one."""
    todo = [deque(stops) for stops in stops_by_rank]
    now = [1] * len(todo)
    has_sent = [False] * len(todo)
    arrivals: dict[tuple[int, int], deque[int]] = defaultdict(deque)
    messages = []
    while any(todo):
        for rank, stops in enumerate(todo):
            if not stops:
                continue
            stop = stops[0]
            if not has_sent[rank]:
                has_sent[rank] = True
                for receiver, values in stop.sent:
                    messages.append(Message(now[rank], stop.phase, rank, receiver, values))
                    arrivals[rank, receiver].append(now[rank] + 1)
            if all(arrivals[source, rank] for source in stop.sources):
                came = [arrivals[source, rank].popleft() for source in stop.sources]
                now[rank] = max([now[rank] + bool(stop.sent), *came])
                has_sent[rank] = False
                stops.popleft()
    return sorted(messages, key=lambda m: (m.round, m.sender, m.receiver))


def run(name: str, comm: Communicator) -> list[Message]:
    """Run one algorithm; rank 0 gets the messages of all ranks."""
    i = np.arange(ELEMENTS)
    x = 2**comm.rank + i * 2**comm.size
    out = np.empty_like(x)
    channel, stops = Recorder(comm), []
    algorithm = FUNCTIONS[name](channel, x, out, Reduction("sum", "int64", comm.size))
    before = comm.bytes_sent
    comm.run(name, watch(algorithm, channel, stops))
    expected = 2**comm.size - 1 + comm.size * i * 2**comm.size
    recorded = sum(values.nbytes for stop in stops for _, values in stop.sent)
    is_right = np.array_equal(out, expected) and recorded == comm.bytes_sent - before
    gathered = comm.mpi.gather((is_right, stops))
    if comm.rank != 0:
        return []
    if wrong := [rank for rank, (right, _) in enumerate(gathered) if not right]:
        sys.exit(f"{name}: a wrong sum or a wrong count on ranks {wrong}")
    return in_rounds([stops for _, stops in gathered])


def contents(values: np.ndarray, size: int) -> tuple[str, str]:
    """Which elements these are, and the ranks whose numbers are in their sum."""
    if not values.size:
        return "none", ""
    mask = int(values[0]) % 2**size
    ranks = [str(rank) for rank in range(size) if mask >> rank & 1]
    first, last = (int(value) // 2**size // len(ranks) for value in values[[0, -1]])
    return f"{first}-{last}", "all" if len(ranks) == size else "+".join(ranks)


def show(name: str, messages: list[Message], size: int) -> None:
    rows, last = [], 0
    for message in messages:
        elements, ranks = contents(message.values, size)
        number = "" if message.round == last else f"{message.round}"
        last = message.round
        ends = f"{message.sender}", f"{message.receiver}"
        rows.append((number, *ends, f"{message.values.nbytes}", elements, ranks, message.phase))
    print(f"\n{name}: {size} ranks, {ELEMENTS} elements of 8 bytes\n")
    print(text_table(("round", "from", "to", "bytes", "elements", "sum of", "phase"), rows))
    sent = traffic(messages, size).sum(axis=1)
    share = f"{sent.min()}" if sent.min() == sent.max() else f"{sent.min()} to {sent.max()}"
    print(
        f"{last} rounds, {len(messages)} messages; every rank sent {share} bytes, for a vector of "
        f"{8 * ELEMENTS}; all ranks have the right sum"
    )


def traffic(messages: list[Message], size: int) -> np.ndarray:
    """Bytes from each rank (row) to each (column)."""
    table = np.zeros((size, size), int)
    for message in messages:
        table[message.sender, message.receiver] += message.values.nbytes
    return table


def picture(results: dict[str, list[Message]], size: int) -> None:
    """For each algorithm its messages round by round, and the bytes between each two ranks."""
    figure, axes = plt.subplots(
        len(results),
        2,
        figsize=(10.5, len(results) * (1.1 + 0.36 * size)),
        width_ratios=[2.6, 1],
        layout="constrained",
        squeeze=False,
    )
    rounds = max((m.round for messages in results.values() for m in messages), default=1)
    largest = max((m.values.nbytes for messages in results.values() for m in messages), default=1)
    for (left, right), (name, messages) in zip(axes, results.items(), strict=True):
        for message in messages:
            is_result = contents(message.values, size)[1] == "all"
            left.annotate(
                "",
                (message.round + 0.94, message.receiver),
                (message.round + 0.06, message.sender),
                arrowprops={
                    "arrowstyle": "-|>",
                    "color": "tab:orange" if is_result else "tab:blue",
                    "linewidth": 0.6 + 2.4 * message.values.nbytes / largest,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )
        left.set(xlim=(1, rounds + 1), ylim=(size - 0.5, -0.5), yticks=range(size), ylabel="rank")
        left.set_xticks([number + 0.5 for number in range(1, rounds + 1)], range(1, rounds + 1))
        left.set(xlabel="round", title=f"{name}, {size} ranks")
        for number in range(1, rounds + 2):
            left.axvline(number, color="0.85", linewidth=0.8, zorder=0)
        table = traffic(messages, size)
        right.imshow(table, cmap="Blues", vmin=0, vmax=1.4 * max(table.max(), 1))
        for sender, receiver in np.argwhere(table):
            right.text(
                receiver, sender, table[sender, receiver], ha="center", va="center", fontsize=8
            )
        right.set(xlabel="to rank", ylabel="from rank", title="bytes in total")
        right.set(xticks=range(size), yticks=range(size))
    figure.suptitle("blue: parts of the sum; orange: the whole sum", fontsize="medium")
    save(figure, options.output)


def main() -> None:
    comm = Communicator()
    if comm.size > 32:
        sys.exit("32 ranks at most: sums hold one bit for each")
    results = {name: run(name, comm) for name in options.algorithms}
    if comm.rank == 0:
        for name, messages in results.items():
            show(name, messages, comm.size)
        picture(results, comm.size)


if __name__ == "__main__":
    main()
