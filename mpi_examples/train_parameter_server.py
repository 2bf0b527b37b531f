"""Train on digits with a parameter server: synchronous, asynchronous, and by Leader SGD.

    python -m mpi_examples.train_parameter_server
    python -m mpi_examples.train_parameter_server --straggler 0.02

With --straggler one of the workers sleeps in every step.  All take equally many; the time in the
table is that of the median worker, which shows who waits for the slow one.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from hvd_compress.cli.options import picture_file
from hvd_compress.launch import under_mpirun
from mpi_examples.data import digits, share
from mpi_examples.study import Run, each_run, percent, size, study_parser, table

TOP_K = "topk:density=0.05"
#: of a model and SGD
MODES = {
    "sync": lambda *own: hvd.parameter_server(*own),
    "sync, 1 backup": lambda *own: hvd.parameter_server(*own, backup=1),
    "async": lambda *own: hvd.parameter_server(*own, mode="async"),
    "sync, top-k": lambda *own: hvd.parameter_server(*own, compression=TOP_K),
    "async, top-k": lambda *own: hvd.parameter_server(*own, mode="async", compression=TOP_K),
    "leaders, one": lambda *own: hvd.AsynchronousLeaderSGD(
        *own, local_every=4, global_every=4, local_pull=0, local_drift=0
    ),
    "leaders, groups of 2": lambda *own: hvd.AsynchronousLeaderSGD(
        *own, local_every=4, global_every=8, groups=2
    ),
}


def arguments() -> argparse.Namespace:
    parser = study_parser(__doc__, lr=0.1)
    parser.set_defaults(ranks=5)  # of which one is the server
    modes = [*MODES]
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes, metavar="MODE")
    parser.add_argument(
        "--straggler", type=float, default=0.0, metavar="SECONDS", help="of sleep of worker 0"
    )
    parser.add_argument("--output", type=picture_file, default=Path("results/parameter_server.png"))
    options = parser.parse_args()
    if options.straggler < 0:
        parser.error("--straggler must be 0 or more")
    return options


options = arguments()
under_mpirun(options.ranks)

import matplotlib.pyplot as plt
import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from mpi_examples.models import accuracy, perceptron
from mpi_examples.report import save

world = MPI.COMM_WORLD


def train(mode: str, seed: int) -> Run:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    model = perceptron(64, 256, 10)
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr)
    worker = MODES[mode](model, sgd)
    # Ends all ranks, the server too, if there is no batch for each worker.
    share(len(x), seed, 0, 0, max(world.size - 1, 1), options.batch_size)
    world.Barrier()
    start = time.perf_counter()
    with worker:
        for epoch in worker.batches(range(options.epochs)):
            mine = share(len(x), seed, epoch, worker.rank, worker.size, options.batch_size)
            for batch in worker.batches(mine):
                if worker.rank == 0:
                    time.sleep(options.straggler)
                sgd.zero_grad()
                loss = functional.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                if mode.startswith("leaders"):
                    worker.step(loss.detach())
                else:
                    worker.step()
        own = time.perf_counter() - start
    seconds = statistics.median(world.allgather(own)[1:])
    right = accuracy(model, x_test, y_test)
    if len(set(world.allgather(right))) > 1:
        raise SystemExit(f"{mode}: the ranks' models differ")
    found = worker.stats()
    return {
        "test accuracy": right,
        "up a step": found.bytes_up / found.pushes,
        "down a step": found.bytes_down / found.pushes,
        "staleness (most)": (found.mean_staleness, max(found.staleness, default=0)),
        "dropped": (found.dropped.total(), found.pushes),
        "time": seconds,
    }


def staleness(values: list[tuple[float, int]]) -> str:
    means, most = zip(*values, strict=True)
    return f"{statistics.mean(means):.2f} ({max(most)})"


def dropped(values: list[tuple[int, int]]) -> str:
    return " of ".join(f"{statistics.mean(each):.0f}" for each in zip(*values, strict=True))


COLUMNS = {
    "test accuracy": percent,
    "up a step": size,
    "down a step": size,
    "staleness (most)": staleness,
    "dropped": dropped,
    "time": lambda seconds: f"{statistics.mean(seconds):.2f} s",
}


def picture(runs: dict[str, list[Run]], slow: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for mode, group in runs.items():
        seconds, right = (
            statistics.mean(run[column] for run in group) for column in ("time", "test accuracy")
        )
        axes.barh(f"{mode}  ({right:.1f} %)", seconds, color="C0")
    axes.invert_yaxis()
    axes.set(xlabel="seconds until the median worker has taken its steps")
    axes.set_title(f"Digits, {world.size - 1} workers{slow}")
    save(figure, options.output)


if __name__ == "__main__":
    hvd.init()
    runs = each_run(options.modes, options.seeds, train, world.rank)
    if world.rank == 0:
        straggler = 1000 * options.straggler
        slow = f", one sleeps {straggler:g} ms a step" if straggler else ""
        print(
            f"\n{world.size - 1} workers{slow}, a server, {options.epochs} epochs, "
            f"{options.seeds} seeds\n"
        )
        print(table(runs, COLUMNS, "mode"))
        picture(runs, slow)
