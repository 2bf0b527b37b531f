"""Train on digits over a graph, where ranks exchange with their neighbours only.

    python -m mpi_examples.train_decentralized
    python -m mpi_examples.train_decentralized --data shuffled --topology cycle
    mpirun -np 4 python -m mpi_examples.train_decentralized --methods dense lead

Every rank ends with a model of its own.  Tested are their average and each of them.  With
``--data sorted`` each rank has the images of other labels than the rest.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

from hvd_compress.cli.options import parser_of
from hvd_compress.cli.tables import text_table
from hvd_compress.errors import ConfigError
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes
from hvd_compress.systems.graphs import ExactDiffusion, blockwise
from mpi_examples.data import digits
from mpi_examples.study import check_counts, each_run, spread

METHODS = (
    "dense",
    "diffusion",
    "exact_diffusion",
    "extra",
    "gradient_tracking",
    "choco_sgd",
    "lead",
    "prox_lead",
)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument(
        "--topology", default="line", help='undirected, such as "cycle" or "grid:rows=2"'
    )
    parser.add_argument("--data", choices=("sorted", "shuffled"), default="sorted")
    parser.add_argument("--bits", type=int, default=2, help="of choco_sgd and LEAD, from 1 to 8")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3, help="runs per method")
    parser.add_argument("--batch-size", type=int, default=16, help="per rank")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0, help="of the local optimizer")
    parser.add_argument("--width", type=int, default=256, help="of the network's hidden layer")
    parser.add_argument("--ranks", type=int, default=4, help="when started without mpirun")
    options = parser.parse_args()
    check_counts(parser, options, "epochs", "seeds", "batch_size", "width", "ranks")
    try:
        ExactDiffusion(options.topology).check_ranks(options.ranks)  # undirected, and connected
        blockwise(options.bits)
    except ConfigError as error:
        parser.error(str(error))
    return options


options = arguments()
under_mpirun(options.ranks)

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from mpi_examples.local_methods import over_a_graph
from mpi_examples.models import accuracy

world = MPI.COMM_WORLD


@dataclasses.dataclass
class Run:
    """What a run ended with, and what it cost a step; accuracies in percent."""

    average: float
    worst: float
    distance: float
    mean_bytes: float
    most_bytes: float
    milliseconds: float


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(),
        torch.nn.Linear(64, options.width),
        torch.nn.ReLU(),
        torch.nn.Linear(options.width, 10),
    )


def distributed(name: str, sgd: torch.optim.Optimizer) -> tuple[Any, Any]:
    """The optimizer of a method, and what counts its bytes."""
    if name == "dense":
        optimizer = hvd.DistributedOptimizer(sgd, compression="none")
        return optimizer, optimizer.compression
    optimizer = over_a_graph(name, sgd, options.topology, options.bits)
    return optimizer, optimizer.training


def places(labels: np.ndarray) -> np.ndarray:
    """Which images are this rank's, as many for each."""
    order = np.argsort(labels, kind="stable")
    if options.data == "shuffled":
        order = np.random.default_rng(0).permutation(len(labels))
    count = len(labels) // world.size
    return order[world.rank * count :][:count]


def train(name: str, seed: int) -> Run:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    x, x_test, y, y_test = digits(seed)
    own = places(y)
    images, labels = torch.from_numpy(x[own]), torch.from_numpy(y[own])
    model = network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    optimizer, counter = distributed(name, sgd)
    size = min(options.batch_size, len(own))
    steps = len(own) // size
    start = time.perf_counter()
    for epoch in range(options.epochs):
        order = np.random.default_rng([seed, epoch, world.rank]).permutation(len(own))
        for batch in order[: steps * size].reshape(steps, size):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    steps *= options.epochs
    milliseconds = 1000 * (time.perf_counter() - start) / steps
    # Counted before the average at the end.
    sent = [total / steps for total in world.allgather(counter.stats().total.bytes_sent)]
    unseen = torch.from_numpy(x_test), torch.from_numpy(y_test)
    worst = min(world.allgather(accuracy(model, *unseen)))
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    hvd.average_parameters(model.parameters())
    mean = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    squares = world.allgather(float((before - mean).square().sum() / mean.square().sum()))
    return Run(
        accuracy(model, *unseen),
        worst,
        statistics.mean(squares) ** 0.5,
        statistics.mean(sent),
        max(sent),
        milliseconds,
    )


def table(runs: dict[str, list[Run]], dense: int) -> str:
    """One row a method; ``dense`` is the bytes of the parameters."""
    rows = []
    for name, group in runs.items():
        sent = statistics.mean(run.mean_bytes for run in group)
        rows.append(
            (
                name,
                spread([run.average for run in group]) + " %",
                spread([run.worst for run in group]) + " %",
                f"{statistics.mean(run.distance for run in group):.1e}",
                human_bytes(sent),
                human_bytes(statistics.mean(run.most_bytes for run in group)),
                f"{sent / dense:.2f}x",
                f"{statistics.median(run.milliseconds for run in group):.1f} ms",
            )
        )
    header = "method", "average model", "worst of ranks", "distance", "sent a step", "by busiest"
    return text_table((*header, "of dense", "time a step"), rows)


def main() -> None:
    hvd.init()
    runs = each_run(options.methods, options.seeds, train, world.rank)
    if world.rank:
        return
    dense = 4 * sum(p.numel() for p in network().parameters())
    print(
        f"\n{world.size} ranks, {options.topology}, {options.data} data, {options.epochs} epochs, "
        f"{options.seeds} seeds, lr {options.lr:g}, momentum {options.momentum:g}\n"
        "sent a step: to neighbours, on average over ranks; of dense: beside the gradient's bytes\n"
        "distance: of the ranks' models from their average, relative to its norm\n"
    )
    print(table(runs, dense))


if __name__ == "__main__":
    main()
