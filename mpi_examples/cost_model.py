"""What an allreduce costs: measure the cost model, compare it with real times, and look ahead.

    python -m mpi_examples.cost_model
    mpirun -np 16 -H node1:8,node2:8 python -m mpi_examples.cost_model --bytes 8 65536 100000000

``mpi.allreduce(x)`` chooses by the times of the algorithms at a few sizes, on the ranks that it
runs with.  For other numbers of ranks there are formulas with a few measured constants; here these
are put beside the time that each algorithm takes, and carried on to ranks that are not there.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.integrations.launch import under_mpirun


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    parser.add_argument(
        "--bytes",
        type=int,
        nargs="+",
        default=[8, 2**10, 2**14, 2**18, 2**20, 2**22],
        metavar="N",
        help="sizes of the arrays to measure",
    )
    parser.add_argument("--samples", type=int, default=11, help="of which the median counts")
    parser.add_argument(
        "--predict",
        type=int,
        nargs="+",
        default=[2**16, 2**26],
        metavar="N",
        help="sizes to look ahead for, in bytes",
    )
    parser.add_argument("--most-ranks", type=int, default=256, help="to look ahead to")
    parser.add_argument("--output", type=picture_file, default=Path("results/cost_model.png"))
    options = parser.parse_args()
    for name, least in (("ranks", 2), ("samples", 1), ("most_ranks", 4)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be {least} or more")
    if min(options.bytes + options.predict) < 4:
        parser.error("--bytes and --predict must be 4 or more: the size of a float32")
    return options


options = arguments()
under_mpirun(options.ranks)

import matplotlib.pyplot as plt

from hvd_compress import mpi
from hvd_compress.mpi.dense import ALGORITHMS
from hvd_compress.stats import human_bytes
from mpi_examples.report import save

comm = mpi.Communicator(checks=0)  # which are for the first steps of a training
#: MPI's own is known where it was measured
MODELLED = [name for name, algorithm in ALGORITHMS.items() if algorithm.seconds]
COLORS = dict(zip(ALGORITHMS, plt.colormaps["tab10"].colors, strict=False))


def measure() -> dict[int, dict[str, float]]:
    """Seconds by size and algorithm: medians of what the slowest rank took."""
    total = len(options.bytes) * (options.samples + 1)
    result: dict[int, dict[str, float]] = {}
    with tqdm(total=total, disable=comm.rank != 0, ncols=90, mininterval=1) as bar:
        for size in options.bytes:
            x = np.ones(size // 4, np.float32)
            out = np.empty_like(x)
            samples: dict[str, list[float]] = {name: [] for name in ALGORITHMS}
            # One more than is counted: the first opens connections and touches memory.  Algorithms
            # take turns, so that the machine's load hits all alike.
            for _ in range(options.samples + 1):
                for name in ALGORITHMS:
                    comm.mpi.Barrier()
                    start = time.perf_counter()
                    mpi.allreduce(x, algorithm=name, out=out, comm=comm)
                    seconds = comm.mpi.allgather(time.perf_counter() - start)
                    samples[name].append(max(seconds))
                bar.update()
            result[size] = {name: statistics.median(s[1:]) for name, s in samples.items()}
    return result


def show(model: mpi.CostModel, measured: dict[int, dict[str, float]]) -> None:
    print(
        f"\n{model.size} ranks: a round costs {_time(model.alpha)}, one more message in it "
        f"{_time(model.overhead)};\na megabyte around the ring {_time(1e6 * model.beta)}, between "
        f"two {_time(1e6 * (model.beta_pair or model.beta))}, to all others "
        f"{_time(1e6 * (model.beta_fan or model.beta))}; adding one {_time(1e6 * model.gamma)}\n"
    )
    header = f"{'bytes':>11}  {'algorithm':17} {'measured':>9} {'predicted':>10} {'error':>8}"
    print(header)
    print("-" * len(header))
    errors: dict[str, list[float]] = {name: [] for name in MODELLED}
    first = next(iter(ALGORITHMS))
    for size, seconds in measured.items():
        for name in ALGORITHMS:
            marks = ["fastest"] if seconds[name] == min(seconds.values()) else []
            marks += ["chosen"] if name == model.fastest(size) else []
            line = f"{f'{size:,}' if name == first else '':>11}  {name:17} "
            line += f"{_time(seconds[name]):>9} "
            if name in errors:  # those that have a formula
                predicted = model.formula(name, size, model.size)
                error = predicted / seconds[name] - 1
                errors[name].append(abs(error))
                line += f"{_time(predicted):>10} {error:>+8.0%}"
            else:
                line += f"{'':19}"
            print(f"{line}  {', '.join(marks)}".rstrip())
    print("\nmedian error, up or down:", end=" ")
    print(", ".join(f"{name} {statistics.median(e):.0%}" for name, e in errors.items()))


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def picture(model: mpi.CostModel, measured: dict[int, dict[str, float]]) -> None:
    """Measured and predicted over sizes; predicted over ranks."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    sizes = np.geomspace(min(measured), max(measured), 60)
    for name in ALGORITHMS:
        color = COLORS[name]
        milliseconds = [1e3 * seconds[name] for seconds in measured.values()]
        left.plot(list(measured), milliseconds, "o", color=color, label=name)
        if name in MODELLED:
            predicted = [1e3 * model.formula(name, int(n), model.size) for n in sizes]
            left.plot(sizes, predicted, color=color)
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="time [ms]")
    left.set_title(f"{model.size} ranks: measured (points) and predicted")
    left.legend()

    ranks = [2**i for i in range(2, options.most_ranks.bit_length())]
    styles = itertools.cycle(["--", "-", ":", "-."])
    for size, style in zip(options.predict, styles, strict=False):
        for name in MODELLED:
            seconds = [1e3 * model.formula(name, size, p) for p in ranks]
            right.plot(
                ranks, seconds, style, color=COLORS[name], label=f"{name}, {human_bytes(size)}"
            )
    right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="time [ms]")
    right.set_xticks(ranks, ranks)
    right.minorticks_off()
    right.set_title("predicted for more ranks")
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save(figure, options.output)


def main() -> None:
    if comm.size == 1:
        raise SystemExit("one rank sends nothing: start two or more")
    model = mpi.measure(comm)  # a collective; all ranks get the same numbers
    measured = measure()
    if comm.rank == 0:
        show(model, measured)
        picture(model, measured)
        print(f"\npicture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
