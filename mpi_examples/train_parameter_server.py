"""Train on digits with a parameter server: synchronous, asynchronous, and by Leader SGD.

    python -m mpi_examples.train_parameter_server
    python -m mpi_examples.train_parameter_server --straggler 0.02

With --straggler one of the workers sleeps in every step.  All take equally many; the time in the
table is that of the median worker, which shows who waits for the slow one.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.cli.tables import text_table
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes
from mpi_examples.data import digits, share
from mpi_examples.study import check_counts, each_run, spread

TOP_K = "topk:density=0.05"
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "sync, 1 backup": {"backup": 1},
    "async": {"mode": "async"},
    "sync, top-k": {"compression": TOP_K},
    "async, top-k": {"mode": "async", "compression": TOP_K},
}
#: asynchronous Leader SGD, whose workers take local steps
LEADERS: dict[str, dict[str, Any]] = {
    "leaders, one": {"local_every": 4, "global_every": 4, "local_pull": 0, "local_drift": 0},
    "leaders, groups of 2": {"local_every": 4, "global_every": 8, "groups": 2},
}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    modes = [*MODES, *LEADERS]
    parser.add_argument("--modes", nargs="+", choices=modes, default=modes, metavar="MODE")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="runs per mode")
    parser.add_argument("--batch-size", type=int, default=16, help="per worker")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--workers", type=int, default=4, help="when started without mpirun")
    parser.add_argument(
        "--straggler", type=float, default=0.0, metavar="SECONDS", help="of sleep of worker 0"
    )
    parser.add_argument("--output", type=picture_file, default=Path("results/parameter_server.png"))
    options = parser.parse_args()
    check_counts(parser, options, "epochs", "seeds", "batch_size", "workers")
    if options.straggler < 0 or options.lr <= 0:
        parser.error("--straggler must be 0 or more, and --lr more than 0")
    return options


options = arguments()
under_mpirun(options.workers + 1)

import matplotlib.pyplot as plt
import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from mpi_examples.models import accuracy
from mpi_examples.report import save

world = MPI.COMM_WORLD


@dataclasses.dataclass
class Run:
    """The result of a run; bytes are those of a gradient, and of a reply, and the seconds those
    until the median worker had taken its steps."""

    accuracy: float
    up: float
    down: float
    staleness: float
    stalest: int
    dropped: int
    gradients: int
    seconds: float


def train(mode: str, seed: int) -> Run:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
    )
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr)
    worker: Any
    if mode in LEADERS:
        worker = hvd.AsynchronousLeaderSGD(model, sgd, **LEADERS[mode])
    else:
        worker = hvd.parameter_server(model, sgd, seed=seed, **MODES[mode])
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
                worker.step(*[loss.detach()] * (mode in LEADERS))
        own = time.perf_counter() - start
    seconds = statistics.median(world.allgather(own)[1:])
    right = accuracy(model, x_test, y_test)
    if len(set(world.allgather(right))) > 1:
        raise SystemExit(f"{mode}: the ranks' models differ")
    found = worker.stats()
    return Run(
        right,
        found.bytes_up / found.pushes,
        found.bytes_down / found.pushes,
        found.mean_staleness,
        max(found.staleness, default=0),
        found.dropped.total(),
        found.pushes,
        seconds,
    )


def table(runs: dict[str, list[Run]]) -> str:
    rows = []
    for mode, group in runs.items():
        mean = {
            f.name: statistics.mean(getattr(run, f.name) for run in group)
            for f in dataclasses.fields(Run)
        }
        rows.append(
            (
                mode,
                spread([run.accuracy for run in group]) + " %",
                human_bytes(mean["up"]),
                human_bytes(mean["down"]),
                f"{mean['staleness']:.2f} ({max(run.stalest for run in group)})",
                f"{mean['dropped']:.0f} of {mean['gradients']:.0f}",
                f"{mean['seconds']:.2f} s",
            )
        )
    header = "mode", "test accuracy", "up a step", "down a step", "staleness (most)", "dropped"
    return text_table((*header, "time"), rows)


def picture(runs: dict[str, list[Run]]) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for mode, group in runs.items():
        seconds = statistics.mean(run.seconds for run in group)
        right = statistics.mean(run.accuracy for run in group)
        axes.barh(f"{mode}  ({right:.1f} %)", seconds, color="C0")
    axes.invert_yaxis()
    slow = f", one worker {1000 * options.straggler:g} ms slower" if options.straggler else ""
    axes.set(
        xlabel="seconds until the median worker has taken its steps",
        title=f"Digits, {world.size - 1} workers{slow}",
    )
    save(figure, options.output)


def main() -> None:
    hvd.init()
    runs = each_run(options.modes, options.seeds, train, world.rank)
    if world.rank:
        return
    slow = f"; worker 0 sleeps {1000 * options.straggler:g} ms a step" if options.straggler else ""
    print(
        f"\n{world.size - 1} workers, a server, {options.epochs} epochs, {options.seeds} seeds"
        f"{slow}\n"
    )
    print(table(runs))
    picture(runs)
    print(f"\npicture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
