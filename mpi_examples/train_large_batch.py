"""Train on digits with a small batch, and with a large one in several ways.

    python -m mpi_examples.train_large_batch
    python -m mpi_examples.train_large_batch --recipes small warmup lars --compression none dgc
    python -m mpi_examples.train_large_batch --picture docs/large-batch.png
    mpirun -np 4 python -m mpi_examples.train_large_batch

All recipes see each example equally often.  A large batch takes fewer steps: the questions are what
that costs in accuracy, and which learning rate makes up for it.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from pathlib import Path
from typing import Any

from hvd_compress import as_compressor
from hvd_compress.cli.options import picture_file, positive
from hvd_compress.errors import CompressionError
from hvd_compress.launch import under_mpirun
from mpi_examples.data import digits
from mpi_examples.study import Run, each_run, first, percent, size, study_parser, table


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the learning rate of the small batch becomes that of the large one, and who steps."""

    says: str
    scaling: str | None = None  # "linear", "sqrt" or none
    warms_up: bool = False
    optimizer: str = "SGD"
    takes_sam: bool = False
    is_large: bool = True


RECIPES = {
    "small": Recipe("SGD, small batch", is_large=False),
    "large": Recipe("SGD, same rate"),
    "linear": Recipe("SGD, linear scaling", "linear"),
    "warmup": Recipe("SGD, linear scaling, warm-up", "linear", True),
    "lars": Recipe("LARS, linear scaling, warm-up", "linear", True, "LARS"),
    "lamb": Recipe("LAMB, sqrt scaling, warm-up", "sqrt", True, "LAMB"),
    "sam": Recipe("SAM, linear scaling, warm-up", "linear", True, takes_sam=True),
}
#: curves of the picture
DRAWN = ("large", "linear", "warmup", "lamb")
#: optimizers of one rank, of parameters, at learning rates that suit the small batch
OPTIMIZERS = {
    "SGD": lambda own: torch.optim.SGD(own, 0.05, momentum=0.9),
    # At usual rates, of 1 and more, the plain steps of its biases would be too long.
    "LARS": lambda own: hvd.LARS(own, 0.05, momentum=0.9, trust_coefficient=0.01),
    "LAMB": lambda own: hvd.LAMB(own, 0.02),
}


def arguments() -> argparse.Namespace:
    parser = study_parser(__doc__, epochs=15)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES], metavar="NAME")
    parser.add_argument("--compression", nargs="+", default=["none"])
    parser.add_argument("--small", type=positive, default=32, help="examples a step, of all ranks")
    parser.add_argument("--large", type=positive, default=256, help="examples a step, of all ranks")
    parser.add_argument("--warmup-epochs", type=int, default=4)
    parser.add_argument(
        "--picture",
        type=picture_file,
        help="train with all batch sizes from --small on, and draw errors",
    )
    options = parser.parse_args()
    if options.large <= options.small:
        parser.error("--large must be more than --small")
    if not 0 <= options.warmup_epochs <= options.epochs:
        parser.error("--warmup-epochs must be 0 to --epochs")
    for text in options.compression:
        try:
            as_compressor(text)
        except CompressionError as error:
            parser.error(str(error))
    return options


options = arguments()
under_mpirun(options.ranks)

import matplotlib.pyplot as plt
import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional
from torch.optim.lr_scheduler import ChainedScheduler, MultiStepLR

import hvd_compress.torch.mpi as hvd
from mpi_examples.models import accuracy, perceptron
from mpi_examples.report import save

world = MPI.COMM_WORLD


def train(name: str, compression: str, batch: int, seed: int) -> Run:
    recipe, part = RECIPES[name], batch // world.size
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    batches = len(x) // (part * world.size) if part else 0
    if not batches:
        raise SystemExit(
            f"a batch of {batch} is none for {world.size} ranks and {len(x)} examples: choose "
            "other --small and --large"
        )
    model = perceptron(64, 128, 128, 10)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[recipe.optimizer](model.parameters()),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    steps, schedulers = options.epochs * batches, []
    if recipe.scaling:
        warmup = hvd.scaled_warmup(
            optimizer,
            batch_size=part * world.size,
            reference_batch_size=options.small,
            steps=options.warmup_epochs * batches if recipe.warms_up else 0,
            scaling=recipe.scaling,
        )
        schedulers.append(warmup)
    schedulers.append(MultiStepLR(optimizer, [steps * 2 // 3, steps * 9 // 10]))
    scheduler = ChainedScheduler(schedulers)
    sam = hvd.SAM(model, rho=0.05) if recipe.takes_sam else None

    def loss_of(examples: Any = slice(None)) -> torch.Tensor:
        return functional.cross_entropy(model(x[examples]), y[examples])

    for epoch in range(options.epochs):
        optimizer.compression.set_epoch(epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(x))  # one for all ranks
        order = order[: batches * part * world.size].reshape(batches, world.size, part)
        for examples in order[:, world.rank]:
            optimizer.zero_grad()
            if sam is None:
                loss_of(examples).backward()
            else:
                sam.backward(functools.partial(loss_of, examples))
            optimizer.step()
            scheduler.step()
    right = accuracy(model, x_test, y_test)
    with torch.no_grad():
        loss = loss_of().item()
    if len(set(world.allgather(repr((right, loss))))) > 1:  # NaN is not equal to itself
        raise SystemExit("the ranks' models differ")
    return {
        "optimizer and rate": recipe.says,
        "test accuracy": right,
        "training loss": loss,
        "steps": steps,
        "sent in all": optimizer.compression.stats().total.bytes_sent,
    }


COLUMNS = {
    "optimizer and rate": first,
    "test accuracy": percent,
    "training loss": lambda losses: f"{statistics.mean(losses):.4f}",
    "steps": first,
    "sent in all": size,
}


def compare() -> None:
    """Print a table of all recipes with all compressions."""
    cells = {
        f"{name} {text}": (name, text) for name in options.recipes for text in options.compression
    }

    def run(cell: str, seed: int) -> Run:
        name, text = cells[cell]
        return train(name, text, options.large if RECIPES[name].is_large else options.small, seed)

    runs = each_run(cells, options.seeds, run, world.rank)
    if world.rank:
        return
    print(
        f"\n{world.size} ranks, {options.epochs} epochs, {options.seeds} seeds; batches of "
        f"{options.small} and {options.large} examples of all ranks\n"
    )
    print(table(runs, COLUMNS, "recipe"))


def draw(path: Path) -> None:
    """Errors against batch sizes, as in the figures of Goyal et al."""
    sizes = [options.small]
    while 2 * sizes[-1] <= 1024:
        sizes.append(2 * sizes[-1])
    points = {f"{name}, {size} examples": (name, size) for name in DRAWN for size in sizes}
    runs = each_run(
        points,
        options.seeds,
        lambda point, seed: train(points[point][0], "none", points[point][1], seed),
        world.rank,
    )
    if world.rank:
        return
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    print("\ntest error in %, by examples a step")
    print(f"{'':<7}", *(f"{size:>7}" for size in sizes))
    for name in DRAWN:
        groups = [runs[point] for point, (own, _) in points.items() if own == name]
        errors = [[100 - run["test accuracy"] for run in group] for group in groups]
        means = [statistics.mean(each) for each in errors]
        spreads = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in errors]
        print(f"{name:<7}", *(f"{mean:>7.2f}" for mean in means))
        axes.errorbar(sizes, means, spreads, marker=".", capsize=3, label=RECIPES[name].says)
    axes.set(xscale="log", yscale="log", xlabel="examples a step", ylabel="test error [%]")
    axes.set_xticks(sizes, map(str, sizes), minor=False)
    axes.set_xticks([], minor=True)
    axes.set_title(f"Digits, {options.epochs} epochs: what a large batch costs")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, path)


if __name__ == "__main__":
    hvd.init()
    if options.picture:
        draw(options.picture)
    else:
        compare()
