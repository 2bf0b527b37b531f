"""Train on digits with models that teach each other, beside data parallel and ranks alone.

    python -m mpi_examples.train_codistillation
    python -m mpi_examples.train_codistillation --methods dense predictions --epochs 8
    mpirun -np 4 python -m mpi_examples.train_codistillation

All take equally many steps of equally many examples on each rank.  Ranks that exchange predictions
have the same examples in each step, the others a part of the data each.  Tested is a single model;
where ranks have different ones, the accuracy is their mean.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import statistics
from pathlib import Path
from typing import Any

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.cli.tables import text_table
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes
from mpi_examples.data import digits, share
from mpi_examples.study import check_counts, each_run, spread

METHODS = (
    "dense",
    "alone",
    "checkpoints",
    "checkpoints_rarely",
    "predictions",
    "predictions_fp16",
    "predictions_rarely",
)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="runs per method")
    parser.add_argument("--every", type=int, default=8, help="steps between checkpoints")
    parser.add_argument(
        "--rarely", type=int, default=4, help="times as many steps for those that end in _rarely"
    )
    parser.add_argument("--burn-in", type=int, default=11, help="steps without distillation")
    parser.add_argument("--weight", type=float, default=1.0, help="of the distillation loss")
    parser.add_argument("--loss", default="kl", choices=["cross_entropy", "kl", "mse"])
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    parser.add_argument(
        "--output", type=picture_file, help="write a picture of the table to this file"
    )
    options = parser.parse_args()
    check_counts(parser, options, "epochs", "seeds", "every", "rarely", "batch_size", "ranks")
    if options.burn_in < 0 or options.weight < 0:
        parser.error("--burn-in and --weight must be 0 or more")
    return options


options = arguments()
under_mpirun(options.ranks)

import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from mpi_examples.models import accuracy, cnn

world = MPI.COMM_WORLD


@dataclasses.dataclass
class Run:
    accuracy: float
    exchanges: int
    steps: int
    sent: float


def codistilled(method: str, model: Any) -> Any:
    exchange, _, variant = method.partition("_")
    every = options.every if exchange == "checkpoints" else 1
    return hvd.Codistillation(
        model,
        exchange,
        every=every * options.rarely if variant == "rarely" else every,
        burn_in=options.burn_in,
        weight=options.weight,
        loss=options.loss,
        values="float16" if variant == "fp16" else None,
    )


def train(method: str, seed: int) -> Run:
    torch.set_num_threads(1)
    torch.manual_seed(seed if method == "dense" else 1000 * seed + world.rank)
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    model = cnn((1, 8, 8), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)
    codistillation = None
    if method == "dense":
        optimizer = hvd.DistributedOptimizer(optimizer, compression="none")
    elif method != "alone":
        codistillation = codistilled(method, model)
    # Those that exchange predictions have the same examples.
    rank = 0 if method.startswith("predictions") else world.rank
    steps = 0
    for epoch in range(options.epochs):
        for batch in share(len(x), seed, epoch, rank, world.size, options.batch_size):
            steps += 1
            optimizer.zero_grad()
            logits = model(x[batch])
            loss = functional.cross_entropy(logits, y[batch])
            if codistillation is not None:
                loss = codistillation.loss(loss, logits, x[batch])
            loss.backward()
            optimizer.step()
    owner = optimizer.compression if method == "dense" else codistillation
    sent = owner.stats().total.bytes_sent if owner else 0
    exchanges = steps if method == "dense" else owner.exchanges if owner else 0
    every_rank = world.allgather((accuracy(model, x_test, y_test), sent))
    right, sent = (statistics.mean(column) for column in zip(*every_rank, strict=True))
    return Run(right, exchanges, steps, sent)


def table(runs: dict[str, list[Run]]) -> str:
    """One row a method."""
    rows = []
    for method, group in runs.items():
        steps = group[0].steps
        rows.append(
            (
                method,
                spread([run.accuracy for run in group]) + " %",
                f"{group[0].exchanges} of {steps}",
                human_bytes(statistics.mean(run.sent for run in group) / steps),
            )
        )
    return text_table(("method", "test accuracy", "exchanges", "sent a step"), rows)


def draw(runs: dict[str, list[Run]], path: Path) -> None:
    """Accuracy over the bytes sent in a step, with one standard deviation."""
    from matplotlib import pyplot

    from mpi_examples.report import save

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for method, group in runs.items():
        found = [run.accuracy for run in group]
        deviation = statistics.stdev(found) if len(found) > 1 else 0
        sent = statistics.mean(run.sent for run in group) / group[0].steps
        axes.errorbar(sent, statistics.mean(found), deviation, fmt="o", capsize=3, label=method)
    axes.set_xscale("symlog", linthresh=100)
    axes.set(xlabel="bytes sent by a rank in a step", ylabel="test accuracy in %")
    axes.legend(fontsize="small")
    figure.tight_layout()
    save(figure, path)
    print(f"picture: {path.resolve()}")


def main() -> None:
    hvd.init()
    runs = each_run(options.methods, options.seeds, train, world.rank)
    if world.rank:
        return
    print(
        f"\n{world.size} ranks, {options.epochs} epochs, {options.seeds} seeds; burn-in of "
        f"{options.burn_in} steps, weight {options.weight:g}, loss {options.loss}\n"
    )
    print(table(runs))
    if options.output:
        draw(runs, options.output)


if __name__ == "__main__":
    main()
