"""Loss against the bytes that it took: synchronous training, DGC, DiLoCo and Leader SGD.

    python -m mpi_examples.bytes_and_loss
    python -m mpi_examples.bytes_and_loss --tasks lstm --steps 300 --seeds 3
    mpirun -np 4 python -m mpi_examples.bytes_and_loss --methods dense dgc

The digits and the text of accuracy.py, on which every method trains for as many steps, from the
same weights and over the same batches.  Tested is the model that one deploys: the average of the
ranks' models.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.cli.tables import text_table
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes
from mpi_examples.accuracy import RANKS, TASKS
from mpi_examples.study import check_counts, each_run, rate, spread

METHODS = ("dense", "dgc", "diloco", "diloco+dgc", "leader_sgd")


class Rates(NamedTuple):
    """A task in words, and its learning rate of SGD with Nesterov momentum 0.9."""

    what: str
    lr: float
    clip: float | None = None  # the largest norm of a gradient


RATES = {
    "digits": Rates("a convolutional network on digits", 0.03),
    "lstm": Rates("an LSTM on text", 4.0, clip=0.25),
}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=RATES, default=[*RATES], metavar="TASK")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, metavar="METHOD")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--seeds", type=int, default=1, help="runs per method")
    parser.add_argument("--sync-every", type=int, default=8, help="local steps between exchanges")
    parser.add_argument("--density", type=float, default=0.01, help="of dgc")
    parser.add_argument(
        "--output",
        type=picture_file,
        default=Path("results/bytes-and-loss.png"),
        help="the picture",
    )
    options = parser.parse_args()
    check_counts(parser, options, "steps", "seeds", "sync_every")
    if not 0 < options.density <= 1:
        parser.error("--density must be in (0, 1]")
    return options


options = arguments()
under_mpirun(RANKS)

import matplotlib.pyplot as plt
from mpi4py import MPI

import hvd_compress.torch.mpi as hvd
from mpi_examples.local_methods import wrapped
from mpi_examples.report import save

world = MPI.COMM_WORLD


@dataclasses.dataclass
class Run:
    """What a run ended with, and how it got there; means over the ranks."""

    test_loss: float
    score: float
    losses: list[float]  # of training, one a step
    sent: list[float]  # bytes of a rank so far, one a step


def train(name: str, method: str, seed: int) -> Run:
    torch.manual_seed(seed)
    task, rates = TASKS[name](seed), RATES[name]
    model, lr, clip = task.model, rates.lr, rates.clip
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    optimizer = wrapped(
        method, sgd, options.steps, options.sync_every, options.density, clip_norm=clip
    )
    is_local = hasattr(optimizer, "training")
    owner = optimizer.training if is_local else optimizer.compression
    losses, sent = [], []
    for step, batch in enumerate(itertools.islice(batches(task, seed), options.steps)):
        optimizer.param_groups[0]["lr"] = lr * rate(step / options.steps)
        optimizer.zero_grad()
        [loss] = task.losses([batch[world.rank]])
        loss.backward()
        if is_local:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.report(loss)  # Leader SGD chooses by it
            optimizer.step()
        elif clip is not None and method == "dense":  # DGC clips before it adds up
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        losses.append(loss.item())
        sent.append(owner.stats().total.bytes_sent)
    if is_local:
        optimizer.synchronize_parameters()  # which any method pays once
    model.eval()
    with torch.no_grad():
        ends = world.allgather((task.test_loss(), task.score()))
    if len(set(ends)) > 1:
        raise SystemExit(f"{method}: the ranks' models differ")
    means = np.mean(world.allgather((losses, sent)), axis=0).tolist()
    return Run(*ends[0], *means)


def batches(task: Any, seed: int) -> Iterator[Any]:
    """Those of all ranks, for ever."""
    for epoch in itertools.count():
        yield from task.batches(np.random.default_rng([seed, epoch]))


def table(name: str, runs: dict[str, list[Run]]) -> str:
    """One row a method; ratios are to the gradient in every step."""
    measure, rows = TASKS[name].measure, []
    dense = 4 * sum(p.numel() for p in TASKS[name](0).model.parameters())
    for method, group in runs.items():
        sent = statistics.mean(run.sent[-1] / len(run.sent) for run in group)
        rows.append(
            (
                method,
                human_bytes(sent),
                f"{dense / sent:.1f}x" if sent else "-",
                spread([run.test_loss for run in group], 3),
                spread([run.score for run in group]) + measure.unit,
            )
        )
    header = "method", "sent a step", "ratio", "test loss", f"test {measure.name}"
    return f"{name}: {dense // 4:,} parameters\n{text_table(header, rows)}"


def picture(runs: dict[str, dict[str, list[Run]]]) -> None:
    """Training loss over bytes, one panel a task; the mean of all seeds, and of 8 steps each."""
    figure, panels = plt.subplots(
        1, len(runs), figsize=(5.5 * len(runs), 4.2), layout="constrained", squeeze=False
    )
    for axes, (name, methods) in zip(panels[0], runs.items(), strict=True):
        for method, group in methods.items():
            window = min(8, options.steps)
            losses = np.convolve(
                np.mean([run.losses for run in group], axis=0), np.ones(window) / window, "valid"
            )
            sent = np.mean([run.sent for run in group], axis=0)[window - 1 :] / 2**20
            axes.plot(sent[sent > 0], losses[sent > 0], label=method)
        axes.set(xscale="log", xlabel="sent by one rank [MiB]", ylabel="training loss")
        axes.set_title(f"Loss over bytes: {RATES[name].what}, {world.size} ranks")
        axes.grid(alpha=0.3)
        axes.legend()
    save(figure, options.output)


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    if world.size != RANKS:
        raise SystemExit(f"start {RANKS} ranks: batches are dealt to so many")
    found = {
        name: each_run(options.methods, options.seeds, functools.partial(train, name), world.rank)
        for name in options.tasks
    }
    if world.rank:
        return
    print(
        f"\n{world.size} ranks, {options.steps} steps, {options.seeds} seeds; "
        f"{options.sync_every} local steps between exchanges, density {options.density}"
    )
    for name, methods in found.items():
        print(f"\n{table(name, methods)}")
    picture(found)
    print(f"\npicture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
