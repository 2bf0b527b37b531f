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
import statistics
from pathlib import Path

from tqdm import tqdm

from hvd_compress import as_compressor
from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.errors import CompressionError
from hvd_compress.integrations.launch import under_mpirun
from mpi_examples.data import digits
from mpi_examples.large_batch_report import RECIPES, Run, picture, table
from mpi_examples.study import check_counts, each_run

#: curves of the picture
DRAWN = ("large", "linear", "warmup", "lamb")
#: learning rates that suit the small batch
RATES = {"SGD": 0.05, "LARS": 0.05, "LAMB": 0.02}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=[*RECIPES], metavar="NAME")
    parser.add_argument("--compression", nargs="+", default=["none"])
    parser.add_argument("--small", type=int, default=32, help="examples a step, of all ranks")
    parser.add_argument("--large", type=int, default=256, help="examples a step, of all ranks")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--warmup-epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    parser.add_argument(
        "--picture",
        type=picture_file,
        help="train with all batch sizes from --small on, and draw errors",
    )
    options = parser.parse_args()
    check_counts(parser, options, "small", "epochs", "seeds", "ranks")
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

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import ChainedScheduler, MultiStepLR

import hvd_compress.torch.mpi as hvd
from mpi_examples.models import accuracy

world = MPI.COMM_WORLD


@dataclasses.dataclass
class Task:
    """A model, its data, and this rank's part of each batch."""

    seed: int
    batch: int

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        torch.set_num_threads(1)
        self.x, self.x_test, self.y, self.y_test = map(torch.from_numpy, digits(self.seed))
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
            nn.Linear(128, 10),
        )  # fmt: skip
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        self.part = self.batch // world.size
        self.batches = len(self.x) // (self.part * world.size) if self.part else 0
        if not self.batches:
            raise SystemExit(
                f"a batch of {self.batch} is none for {world.size} ranks and {len(self.x)} "
                "examples: choose other --small and --large"
            )

    def epoch(self, number: int) -> np.ndarray:
        """One row of this rank's examples for each step; one shuffle for all ranks."""
        order = np.random.default_rng([self.seed, number]).permutation(len(self.x))
        order = order[: self.batches * self.part * world.size]
        return order.reshape(self.batches, world.size, self.part)[:, world.rank]

    def loss(self, examples: np.ndarray) -> torch.Tensor:
        return functional.cross_entropy(self.model(self.x[examples]), self.y[examples])

    @torch.no_grad()
    def result(self, steps: int, sent: int) -> Run:
        right = accuracy(self.model, self.x_test, self.y_test)
        loss = functional.cross_entropy(self.model(self.x), self.y).item()
        if len(set(world.allgather(repr((right, loss))))) > 1:  # NaN is not equal to itself
            raise SystemExit("the ranks' models differ")
        return Run(right, loss, steps, sent)


def local_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    rate, parameters = RATES[name], model.parameters()
    if name == "LARS":
        # At usual rates, of 1 and more, the plain steps of its biases would be too long.
        return hvd.LARS(parameters, rate, momentum=0.9, trust_coefficient=0.01)
    if name == "LAMB":
        return hvd.LAMB(parameters, rate)
    return torch.optim.SGD(parameters, rate, momentum=0.9)


def train(name: str, compression: str, batch: int, seed: int) -> Run:
    recipe, task = RECIPES[name], Task(seed, batch)
    optimizer = hvd.DistributedOptimizer(
        local_optimizer(recipe.optimizer, task.model),
        named_parameters=task.model.named_parameters(),
        compression=compression,
    )
    steps, schedulers = options.epochs * task.batches, []
    if recipe.scaling:
        warmup = hvd.scaled_warmup(
            optimizer,
            batch_size=task.part * world.size,
            reference_batch_size=options.small,
            steps=options.warmup_epochs * task.batches if recipe.warms_up else 0,
            scaling=recipe.scaling,
        )
        schedulers.append(warmup)
    schedulers.append(MultiStepLR(optimizer, [steps * 2 // 3, steps * 9 // 10]))
    scheduler = ChainedScheduler(schedulers)
    sam = hvd.SAM(task.model, rho=0.05) if recipe.takes_sam else None
    for epoch in range(options.epochs):
        optimizer.compression.set_epoch(epoch)
        for examples in task.epoch(epoch):
            optimizer.zero_grad()
            if sam is None:
                task.loss(examples).backward()
            else:
                sam.backward(lambda examples=examples: task.loss(examples))
            optimizer.step()
            scheduler.step()
    return task.result(steps, optimizer.compression.stats().total.bytes_sent)


def compare() -> None:
    """Print a table of all recipes with all compressions."""

    def run(cell: str, seed: int) -> Run:
        name, _, text = cell.partition(" ")
        batch = options.large if RECIPES[name].is_large else options.small
        return train(name, text, batch, seed)

    cells = [f"{name} {text}" for name in options.recipes for text in options.compression]
    runs = each_run(cells, options.seeds, run, world.rank)
    if world.rank:
        return
    print(
        f"\n{world.size} ranks, {options.epochs} epochs, {options.seeds} seeds; batches of "
        f"{options.small} and {options.large} examples of all ranks\n"
    )
    print(table(runs))


def draw(path: Path) -> None:
    """Errors against batch sizes, as in the figures of Goyal et al."""
    sizes = [options.small]
    while 2 * sizes[-1] <= 1024:
        sizes.append(2 * sizes[-1])
    errors: dict[str, list[list[float]]] = {name: [] for name in DRAWN}
    total, here = len(sizes) * len(DRAWN), world.rank == 0
    with tqdm(total=total, unit="point", disable=not here, ncols=90) as progress:
        for size in sizes:
            for name, found in errors.items():
                if size == options.small and RECIPES[name].optimizer == "SGD" and errors["large"]:
                    found.append(errors["large"][0])  # the rate is what it is
                else:
                    runs = [train(name, "none", size, seed) for seed in range(options.seeds)]
                    found.append([100 - run.accuracy for run in runs])
                progress.set_postfix_str(f"{name}, {size} examples")
                progress.update()
    if world.rank:
        return
    print("\ntest error in %, by examples a step")
    print(f"{'':<7}", *(f"{size:>7}" for size in sizes))
    for name, found in errors.items():
        print(f"{name:<7}", *(f"{statistics.mean(each):>7.2f}" for each in found))
    picture(sizes, errors, options.epochs, path)
    print(f"\n{path.resolve()}")


def main() -> None:
    hvd.init()
    if options.picture:
        draw(options.picture)
    else:
        compare()


if __name__ == "__main__":
    main()
