"""Every system on the same task: what each sends in a step, and what it reaches.

    python -m mpi_examples.all_systems --systems dense dgc powersgd --seeds 1
    python -m mpi_examples.all_systems
    mpirun -np 4 python -m mpi_examples.all_systems --results results/systems.json

Four ranks train the network of models.py on scikit-learn's digits.  All begin with the same weights
(but models that teach each other, which must differ), and have the same 64 images in each step, of
which every rank, or every worker of a parameter server, takes its share.  Runs are kept in
``--results`` and not made again.
"""
# ruff: noqa: E402  A process that is no rank must not import MPI, which starts with it.

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from hvd_compress.cli.options import parser_of, picture_file
from hvd_compress.integrations.launch import under_mpirun
from hvd_compress.stats import human_bytes
from mpi_examples.data import digits
from mpi_examples.study import check_counts, rate, spread
from mpi_examples.systems import FAMILIES, SYSTEMS

RANKS, BATCH = 4, 64


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], metavar="SYSTEM"
    )
    parser.add_argument("--steps", type=int, default=80, help="of each run, of 64 images each")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each system")
    parser.add_argument("--output", type=picture_file, default=Path("results/systems.png"))
    parser.add_argument("--results", type=Path, help="where to keep runs, as JSON")
    options = parser.parse_args()
    check_counts(parser, options, "steps", "seeds")
    if options.steps % 16:
        parser.error("--steps must be a multiple of 16, in which all have exchanged")
    return options


options = arguments()
under_mpirun(RANKS)

import matplotlib.pyplot as plt
import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from mpi_examples.models import accuracy, cnn
from mpi_examples.report import label, save
from mpi_examples.system_trainers import trainer_of

world = MPI.COMM_WORLD


@dataclasses.dataclass
class Run:
    """What a run ended with: accuracy in percent, the bytes that a rank sent in a step, on average
    over the ranks, by the one that sent most, and on average in the last quarter, and seconds."""

    accuracy: float
    sent: float
    most: float
    late: float
    seconds: float


def batches(seed: int, images: int) -> Iterator[np.ndarray]:
    """The images of all ranks in each step."""
    for epoch in itertools.count():
        order = np.random.default_rng([seed, epoch]).permutation(images)
        yield from order[: images // BATCH * BATCH].reshape(-1, BATCH)


def train(name: str, seed: int) -> Run:
    system = SYSTEMS[name]
    torch.manual_seed(1000 * seed + world.rank if system.differs else seed)
    torch.set_num_threads(1)
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    model = cnn((1, 8, 8), 10)
    if not system.differs:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    trainer = trainer_of(system, model, options.steps)
    found = itertools.islice(batches(seed, len(x)), options.steps)
    steps = list(map(np.concatenate, zip(*[found] * system.batches, strict=True)))
    before = None
    world.Barrier()
    start = time.perf_counter()
    with trainer.running():
        for step, batch in trainer.each(steps):
            if 4 * step == 3 * len(steps):
                before = trainer.sent()
            mine = trainer.share(batch)
            trainer.set_rate(system.lr * rate(step / len(steps)))
            logits = model(x[mine])
            trainer.step(functional.cross_entropy(logits, y[mine]), logits, x[mine])
    seconds = time.perf_counter() - start
    sent = trainer.sent()  # before an average at the end, which any method pays once
    trainer.finish()
    if before is None:  # on a server, which sends evenly
        before = sent * 3 / 4
    every = world.allgather((accuracy(model, x_test, y_test), sent, sent - before))
    accuracies, sents, lates = zip(*every, strict=True)
    if not system.differs and len(set(accuracies)) > 1:
        raise SystemExit(f"{name}: the ranks' models differ")
    return Run(
        statistics.mean(accuracies),
        statistics.mean(sents) / options.steps,
        max(sents) / options.steps,
        statistics.mean(lates) / (options.steps / 4),
        seconds,
    )


def table(runs: dict[str, list[Run]], dense: int) -> str:
    """Markdown, one row a system; ``dense`` is the bytes of the parameters."""
    lines = [
        "| system | what travels | sent a step | by the busiest | ratio | in the last quarter |"
        " test accuracy | time a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, group in runs.items():
        sent, most, late = (
            statistics.mean(getattr(run, field) for run in group)
            for field in ("sent", "most", "late")
        )
        milliseconds = statistics.median(1000 * run.seconds / options.steps for run in group)
        cells = [
            f"`{name}`",
            SYSTEMS[name].travels,
            human_bytes(sent),
            "the same" if most < 1.005 * sent else human_bytes(most),
            f"{dense / sent:.{0 if sent < dense / 20 else 1}f}x" if sent else "-",
            human_bytes(late),
            spread([run.accuracy for run in group]).replace("+-", "±") + " %",
            f"{milliseconds:.0f} ms",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(runs: dict[str, list[Run]]) -> None:
    """Test accuracy over bytes; bars are of one standard deviation."""
    figure, axes = plt.subplots(figsize=(11, 7), layout="constrained")
    points: dict[tuple[float, float], str] = {}
    deviations: dict[tuple[float, float], float] = {}
    for color, (family, says) in zip(plt.colormaps["tab10"].colors, FAMILIES.items(), strict=False):
        for name, group in runs.items():
            if SYSTEMS[name].family != family:
                continue
            accuracies = [run.accuracy for run in group]
            mean = statistics.mean(accuracies)
            deviation = statistics.stdev(accuracies) if len(group) > 1 else 0.0
            sent = statistics.mean(run.sent for run in group) / 2**10
            if not sent:
                axes.axhline(mean, color=color, ls=":", label=f"{says}: nothing is sent")
                continue
            axes.errorbar(
                sent, mean, deviation, fmt="o", color=color, capsize=2, lw=0.7, label=says
            )
            says, place = None, (sent, mean)
            deviations[place] = max(deviation, deviations.get(place, 0.0))
            points[place] = f"{points[place]}, {name}" if place in points else name
    axes.set(xscale="log", xlabel="sent by a rank [KiB a step]", ylabel="test accuracy [%]")
    axes.set_title(f"Digits, {world.size} ranks, {options.steps} steps: accuracy against bytes")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")
    label(axes, points, deviations)
    save(figure, options.output)


def main() -> None:
    hvd.init()
    if world.size != RANKS:
        raise SystemExit(f"start {RANKS} ranks: batches are dealt to so many")
    known: dict[str, dict] = {}
    if options.results and options.results.exists():
        known = json.loads(options.results.read_text())
    known = world.bcast(known)  # what rank 0 has
    cells = list(itertools.product(range(options.seeds), options.systems))
    keys = {cell: f"{cell[1]} seed={cell[0]} steps={options.steps}" for cell in cells}
    bar = tqdm(total=len(cells), unit="run", disable=world.rank != 0, ncols=90)
    with bar, logging_redirect_tqdm([logging.getLogger("hvd_compress")]):
        for (seed, name), key in keys.items():
            bar.set_postfix_str(f"{name}, seed {seed}")
            if key not in known:
                known[key] = dataclasses.asdict(train(name, seed))
                if options.results and world.rank == 0:
                    options.results.parent.mkdir(parents=True, exist_ok=True)
                    options.results.write_text(json.dumps(known, indent=1) + "\n")
            bar.update()
    if world.rank:
        return
    runs = {
        name: [Run(**known[keys[seed, name]]) for seed in range(options.seeds)]
        for name in options.systems
    }
    dense = 4 * sum(p.numel() for p in cnn((1, 8, 8), 10).parameters())
    print(
        f"\n{world.size} ranks on this machine's cores, {options.steps} steps, {options.seeds} "
        "seeds\nsent a step: on average over ranks and all steps; ratio: to the gradient in every "
        "step\n"
    )
    print(table(runs, dense))
    picture(runs)
    print(f"\npicture: {options.output.resolve()}")


if __name__ == "__main__":
    main()
