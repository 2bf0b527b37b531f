"""Train on digits with local steps between exchanges, beside methods that exchange in every step.

    python -m mpi_examples.train_local
    python -m mpi_examples.train_local --methods dense diloco easgd --epochs 20
    mpirun -np 4 python -m mpi_examples.train_local

Tested is the model that one deploys: the average of the ranks' models, or the centre of EASGD.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import time

from hvd_compress.cli.options import parser_of
from hvd_compress.cli.tables import text_table
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes
from mpi_examples.data import digits, share
from mpi_examples.study import check_counts, each_run, spread

METHODS = (
    "dense",
    "dgc",
    "local_sgd",
    "post_local_sgd",
    "slowmo",
    "diloco",
    "diloco+topk",
    "diloco+dgc",
    "streaming_diloco",
    "sparse_loco",
    "easgd",
    "leader_sgd",
    "leader_sgd_groups",
)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="runs per method")
    parser.add_argument("--sync-every", type=int, default=8, help="local steps between exchanges")
    parser.add_argument("--density", type=float, default=0.01, help="of dgc, topk and sparse_loco")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    options = parser.parse_args()
    check_counts(parser, options, "epochs", "seeds", "sync_every", "batch_size", "ranks")
    if not 0 < options.density <= 1:
        parser.error("--density must be in (0, 1]")
    if options.ranks % 2 and "leader_sgd_groups" in options.methods:
        parser.error("--ranks must be even: leader_sgd_groups makes groups of 2")
    return options


options = arguments()
under_mpirun(options.ranks)

import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from mpi_examples.local_methods import wrapped
from mpi_examples.models import accuracy, cnn

world = MPI.COMM_WORLD


@dataclasses.dataclass
class Run:
    """What a run ended with, and what it cost over all ranks."""

    accuracy: float
    exchanges: int
    steps: int
    mean_bytes: float
    most_bytes: int
    seconds: float


def train(method: str, seed: int) -> Run:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    model = cnn((1, 8, 8), 10)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    epochs = [
        share(len(x), seed, epoch, world.rank, world.size, options.batch_size)
        for epoch in range(options.epochs)
    ]
    steps = sum(map(len, epochs))
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)
    optimizer = wrapped(method, sgd, steps, options.sync_every, options.density)
    is_local = hasattr(optimizer, "training")
    owner = optimizer.training if is_local else optimizer.compression
    start = time.perf_counter()
    for epoch, batches in enumerate(epochs):
        owner.set_epoch(epoch)
        for step, batch in enumerate(batches):
            done = (epoch * len(batches) + step) / steps
            # To a tenth and not to 0, by which SlowMo divides.
            optimizer.param_groups[0]["lr"] = options.lr * (0.55 + 0.45 * math.cos(math.pi * done))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            if is_local:
                optimizer.report(loss)  # Leader SGD chooses by it
            optimizer.step()
    seconds = time.perf_counter() - start
    # Counted before the average at the end, which any method pays once.
    sent = world.allgather(owner.stats().total.bytes_sent)
    exchanges = owner.exchanges if is_local else steps
    if is_local:
        optimizer.synchronize_parameters()
    right = accuracy(model, x_test, y_test)
    if len(set(world.allgather(right))) > 1:
        raise SystemExit(f"{method}: the ranks' models differ")
    return Run(right, exchanges, steps, statistics.mean(sent), max(sent), seconds)


def table(runs: dict[str, list[Run]], dense: int) -> str:
    """One row a method; ``dense`` is the bytes of the parameters."""
    rows = []
    for method, group in runs.items():
        steps = group[0].steps
        sent = statistics.mean(run.mean_bytes for run in group) / steps
        rows.append(
            (
                method,
                spread([run.accuracy for run in group]) + " %",
                f"{group[0].exchanges} of {steps}",
                human_bytes(sent),
                f"{dense / sent:.1f}x" if sent else "-",
                human_bytes(statistics.mean(run.most_bytes for run in group) / steps),
                f"{statistics.median(1000 * run.seconds / steps for run in group):.1f} ms",
            )
        )
    header = "method", "test accuracy", "exchanges", "sent a step", "ratio", "by busiest"
    return text_table((*header, "time a step"), rows)


def main() -> None:
    hvd.init()
    if world.size % 2 and "leader_sgd_groups" in options.methods:
        raise SystemExit("leader_sgd_groups makes groups of 2: start an even number of ranks")
    runs = each_run(options.methods, options.seeds, train, world.rank)
    if world.rank:
        return
    dense = 4 * sum(p.numel() for p in cnn((1, 8, 8), 10).parameters())
    print(
        f"\n{world.size} ranks, {options.epochs} epochs, {options.seeds} seeds; "
        f"{options.sync_every} local steps between exchanges, density {options.density}\n"
        "sent a step: on average over ranks and all steps; ratio: to the gradient in every step\n"
    )
    print(table(runs, dense))


if __name__ == "__main__":
    main()
