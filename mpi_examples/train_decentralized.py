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
import statistics
import time

from hvd_compress.codecs import uniform_dithering
from hvd_compress.errors import ConfigError
from hvd_compress.launch import under_mpirun
from hvd_compress.systems.graphs import ExactDiffusion, l1
from mpi_examples.data import digits
from mpi_examples.study import Run, each_run, milliseconds, percent, size, study_parser, table

#: what ``method=`` of DistributedOptimizer is; ``dense`` has none
METHODS = {
    "dense": lambda: None,
    "diffusion": lambda: hvd.Diffusion(options.topology),
    "exact_diffusion": lambda: hvd.ExactDiffusion(options.topology),
    "extra": lambda: hvd.EXTRA(options.topology),
    "gradient_tracking": lambda: hvd.GradientTracking(options.topology),
    "lead": lambda: hvd.LEAD(options.topology, codec()),
    "prox_lead": lambda: hvd.LEAD(options.topology, codec(), prox=l1(1e-4)),
}


def codec() -> uniform_dithering:
    return uniform_dithering(2 ** (options.bits - 1), 256, "max")


def arguments() -> argparse.Namespace:
    parser = study_parser(__doc__, lr=0.1, epochs=6)
    names = [*METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names, metavar="METHOD")
    parser.add_argument(
        "--topology", default="line", help='undirected, such as "cycle" or "grid:rows=2"'
    )
    parser.add_argument("--data", choices=("sorted", "shuffled"), default="sorted")
    parser.add_argument("--bits", type=int, choices=range(1, 9), default=2, help="of LEAD")
    parser.add_argument("--momentum", type=float, default=0.0, help="of the local optimizer")
    options = parser.parse_args()
    try:
        ExactDiffusion(options.topology).check_ranks(options.ranks)  # undirected, and connected
    except ConfigError as error:
        parser.error(str(error))
    return options


options = arguments()
under_mpirun(options.ranks)

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

import hvd_compress.torch.mpi as hvd
from mpi_examples.models import accuracy, perceptron

world = MPI.COMM_WORLD


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
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    own = places(y.numpy())
    images, labels = x[own], y[own]
    model = perceptron(64, 256, 10)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=options.momentum)
    method = METHODS[name]()
    if method is None:
        optimizer = hvd.DistributedOptimizer(sgd, compression="none")
        counter = optimizer.compression
    else:
        optimizer = hvd.DistributedOptimizer(sgd, method=method)
        counter = optimizer.training
    batch_size = min(options.batch_size, len(own))
    batches = len(own) // batch_size
    start = time.perf_counter()
    for epoch in range(options.epochs):
        order = np.random.default_rng([seed, epoch, world.rank]).permutation(len(own))
        for batch in order[: batches * batch_size].reshape(batches, batch_size):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    steps, seconds = batches * options.epochs, time.perf_counter() - start
    # Counted before the average at the end.
    sent = [total / steps for total in world.allgather(counter.stats().total.bytes_sent)]
    worst = min(world.allgather(accuracy(model, x_test, y_test)))
    before = parameters_to_vector(model.parameters()).detach()
    if method is not None:
        optimizer.synchronize_parameters()
    mean = parameters_to_vector(model.parameters()).detach()
    squares = world.allgather(float((before - mean).square().sum() / mean.square().sum()))
    return {
        "average model": accuracy(model, x_test, y_test),
        "worst of ranks": worst,
        "distance": statistics.mean(squares) ** 0.5,
        "sent per step": statistics.mean(sent),
        "by busiest": max(sent),
        "of dense": statistics.mean(sent) / (4 * len(mean)),
        "time a step": seconds / steps,
    }


COLUMNS = {
    "average model": percent,
    "worst of ranks": percent,
    "distance": lambda values: f"{statistics.mean(values):.1e}",
    "sent per step": size,
    "by busiest": size,
    "of dense": lambda values: f"{statistics.mean(values):.2f}x",
    "time a step": milliseconds,
}

if __name__ == "__main__":
    hvd.init()
    runs = each_run(options.methods, options.seeds, train, world.rank)
    if world.rank == 0:
        print(
            f"\n{world.size} ranks, {options.topology}, {options.data} data, {options.epochs} "
            f"epochs, {options.seeds} seeds, lr {options.lr:g}, momentum {options.momentum:g}\n"
            "sent per step: to neighbours, on average over ranks; of dense: beside the gradient\n"
            "distance: of the ranks' models from their average, relative to its norm\n"
        )
        print(table(runs, COLUMNS))
