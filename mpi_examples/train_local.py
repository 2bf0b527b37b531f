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

from tqdm import tqdm

from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes
from mpi_examples.data import digits
from mpi_examples.study import check_counts, spread

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
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
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

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from mpi_examples.local_methods import wrapped
from mpi_examples.models import cnn

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


def train(method: str, seed: int, bar: tqdm) -> Run:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    model = cnn((1, 8, 8), 10)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    batches = len(x) // world.size // options.batch_size
    if not batches:
        raise SystemExit("no full batch for each rank: use a smaller --batch-size")
    steps = batches * options.epochs
    sgd = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True)
    optimizer = wrapped(method, sgd, steps, options.sync_every, options.density)
    is_local = hasattr(optimizer, "training")
    owner = optimizer.training if is_local else optimizer.compression
    start = time.perf_counter()
    for epoch in range(options.epochs):
        owner.set_epoch(epoch)
        order = np.random.default_rng([seed, epoch]).permutation(len(x))
        mine = order[world.rank :: world.size][: batches * options.batch_size]
        for step, batch in enumerate(mine.reshape(batches, -1)):
            done = (epoch * batches + step) / steps
            # To a tenth and not to 0, by which SlowMo divides.
            optimizer.param_groups[0]["lr"] = options.lr * (0.55 + 0.45 * math.cos(math.pi * done))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            if is_local:
                optimizer.report(loss)  # Leader SGD chooses by it
            optimizer.step()
        bar.set_postfix_str(f"{method}, seed {seed}")
        bar.update()
    seconds = time.perf_counter() - start
    # Counted before the average at the end, which any method pays once.
    sent = world.allgather(owner.stats().total.bytes_sent)
    exchanges = owner.exchanges if is_local else steps
    if is_local:
        optimizer.synchronize_parameters()
    with torch.no_grad():
        right = (model(x_test).argmax(1) == y_test).float().mean().item()
    if len(set(world.allgather(right))) > 1:
        raise SystemExit(f"{method}: the ranks' models differ")
    return Run(100 * right, exchanges, steps, statistics.mean(sent), max(sent), seconds)


def table(runs: dict[str, list[Run]], dense: int) -> str:
    """One row a method; ``dense`` is the bytes of the parameters."""
    width = max(len("method"), *map(len, runs))
    header = (
        f"{'method':<{width}} {'test accuracy':>16} {'exchanges':>13} {'sent a step':>12}"
        f" {'ratio':>7} {'by busiest':>11} {'time a step':>12}"
    )
    lines = [header, "-" * len(header)]
    for method, group in runs.items():
        found = spread([run.accuracy for run in group])
        steps = group[0].steps
        sent = statistics.mean(run.mean_bytes for run in group) / steps
        most = statistics.mean(run.most_bytes for run in group) / steps
        ratio = f"{dense / sent:.1f}x" if sent else "-"
        milliseconds = statistics.median(1000 * run.seconds / steps for run in group)
        lines.append(
            f"{method:<{width}} {found + ' %':>16}"
            f" {f'{group[0].exchanges} of {steps}':>13} {human_bytes(sent):>12} {ratio:>7}"
            f" {human_bytes(most):>11} {milliseconds:>9.1f} ms"
        )
    return "\n".join(lines)


def main() -> None:
    hvd.init()
    if world.size % 2 and "leader_sgd_groups" in options.methods:
        raise SystemExit("leader_sgd_groups makes groups of 2: start an even number of ranks")
    total = options.epochs * options.seeds * len(options.methods)
    runs: dict[str, list[Run]] = {method: [] for method in options.methods}
    with tqdm(total=total, unit="epoch", disable=world.rank != 0, ncols=90, mininterval=1) as bar:
        for seed in range(options.seeds):
            for method, group in runs.items():
                group.append(train(method, seed, bar))
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
