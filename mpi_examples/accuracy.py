"""What compression does to accuracy: digits and texts, every method from several seeds.

    python -m mpi_examples.accuracy
    python -m mpi_examples.accuracy --tasks lstm --compression dgc topk --density 0.01 --seeds 3

All ranks are inside one process, one after the other (``hvd_compress.engines.lockstep``), which on
one machine takes a fraction of a job's time.  Models and data are those of train_digits.py and
train_text.py.  What was trained is kept in ``--results`` and not trained again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from hvd_compress.engines.lockstep import World
from hvd_compress.stats import human_bytes
from mpi_examples.data import digits
from mpi_examples.data_text import segments, share, standard_library
from mpi_examples.demo import compressor
from mpi_examples.models import cnn
from mpi_examples.models_text import LSTM, Transformer
from mpi_examples.report import ACCURACY, PERPLEXITY, Measure

RANKS, MOMENTUM = 4, 0.9
Batch = list[Any]  # of every rank


class Settings(NamedTuple):
    """Of one task; the command line can replace each."""

    lr: float
    epochs: int
    warmup_epochs: int
    density: float  # where the method names none
    clip: float | None = None


class Digits:
    """As in train_digits.py, with half its epochs and no weight decay."""

    measure: ClassVar[Measure] = ACCURACY
    settings: ClassVar[Settings] = Settings(0.05, epochs=15, warmup_epochs=4, density=0.001)

    def __init__(self, seed: int) -> None:
        self.x, self.x_test, self.y, self.y_test = map(torch.from_numpy, digits(seed))
        self.model: torch.nn.Module = cnn((1, 8, 8), 10)

    def batches(self, random: np.random.Generator) -> Iterator[Batch]:
        order = torch.from_numpy(random.permutation(len(self.x)))
        for batch in order.split(RANKS * 16)[:-1]:
            yield [(self.x[mine], self.y[mine]) for mine in batch.split(16)]

    def losses(self, batch: Batch) -> Iterator[torch.Tensor]:
        for x, y in batch:
            yield functional.cross_entropy(self.model(x), y)

    def test_loss(self) -> float:
        return functional.cross_entropy(self.model(self.x_test), self.y_test).item()

    def score(self) -> float:
        return 100 * (self.model(self.x_test).argmax(1) == self.y_test).float().mean().item()


class Text:
    """As in train_text.py."""

    measure: ClassVar[Measure] = PERPLEXITY
    settings: ClassVar[Settings] = Settings(8.0, 5, warmup_epochs=1, density=0.01, clip=0.25)
    make: ClassVar[Any] = LSTM

    def __init__(self, seed: int) -> None:
        self.text = _corpus()
        self.model = self.make(self.text.words, 128, 16, 0.0)
        self.states: list[Any] = []

    def batches(self, random: np.random.Generator) -> Iterator[Batch]:
        text = np.roll(self.text.train, random.integers(len(self.text.train)))
        self.states = [None] * RANKS
        parts = [segments(share(text, 8, rank, RANKS), 16) for rank in range(RANKS)]
        return map(list, zip(*parts, strict=True))

    def losses(self, batch: Batch) -> Iterator[torch.Tensor]:
        for rank, (words, following) in enumerate(batch):
            logits, self.states[rank] = self.model(words, self.states[rank])
            yield functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def score(self) -> float:
        return math.exp(self.test_loss())

    def test_loss(self) -> float:
        total, count, state = 0.0, 0, None
        for words, following in segments(share(self.text.test, 32, 0, 1), 16):
            logits, state = self.model(words, state)
            loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            total, count = total + loss.item() * following.numel(), count + following.numel()
        return total / count


class TransformerText(Text):
    settings: ClassVar[Settings] = Text.settings._replace(lr=1.0)
    make = Transformer


_corpus = functools.cache(standard_library)
TASKS: dict[str, Any] = {"digits": Digits, "lstm": Text, "transformer": TransformerText}


class Wanted(NamedTuple):
    """One run."""

    task: str
    settings: Settings
    method: str
    seed: int

    def key(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.settings._asdict().items())
        return f"{self.task} {self.method} seed={self.seed} {options}"


def train(run: Wanted) -> dict[str, float]:
    """What a run ends with, and the bytes that rank 0 sent: a step, and in the last."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    task, settings = TASKS[run.task](run.seed), run.settings
    compression = compressor(run.method, settings.density, settings.warmup_epochs)
    clips_itself = settings.clip is not None and hasattr(compression, "clip_norm")
    if clips_itself:
        compression = dataclasses.replace(compression, clip_norm=settings.clip)
    world, model = World(compression, RANKS, fused=True), task.model
    inside = MOMENTUM if compression.takes_momentum else 0.0
    beside = MOMENTUM - inside
    optimizer = torch.optim.SGD(
        model.parameters(), lr=settings.lr, momentum=beside, nesterov=beside > 0
    )
    parameters, done, sent = dict(model.named_parameters()), 0, 0
    for epoch in range(settings.epochs):
        batches = list(task.batches(np.random.default_rng([run.seed, epoch])))
        for step, batch in enumerate(batches):
            world.epoch = epoch + step / len(batches)
            optimizer.param_groups[0]["lr"] = settings.lr * rate(world.epoch, settings)
            gradients = []
            for loss in task.losses(batch):
                optimizer.zero_grad()
                loss.backward()
                gradients.append({n: p.grad for n, p in parameters.items()})
            before = world.record.bytes_sent
            found = world.exchange_all(gradients, momentum=inside, nesterov=inside > 0)[0]
            sent = world.record.bytes_sent - before
            for n, p in parameters.items():
                p.grad = found[n].direction
            if settings.clip is not None and not clips_itself:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            done += 1
    model.eval()
    with torch.no_grad():
        score = task.score()
    dense = 4 * sum(p.numel() for p in parameters.values())
    whole = world.record.bytes_sent / done
    return {"final": score, "sent": whole, "sent_last": sent, "dense": dense, "steps": done}


def rate(epoch: float, settings: Settings) -> float:
    """Of the learning rate: up from a tenth during the warm-up, then down along a cosine."""
    if epoch < settings.warmup_epochs:
        return 0.1 + 0.9 * epoch / settings.warmup_epochs
    rest = (epoch - settings.warmup_epochs) / (settings.epochs - settings.warmup_epochs)
    return (1 + math.cos(math.pi * rest)) / 2


def table(name: str, runs: dict[str, list[dict[str, float]]]) -> str:
    """One row a method: mean and standard deviation, by how much the mean differs from that of the
    dense runs, also in the deviations of these, and the bytes of the last step."""
    measure = TASKS[name].measure
    dense = [run["final"] for run in runs["none"]]
    width = max(map(len, runs))
    header = (
        f"{'method':<{width}} {'mean':>8} {'deviation':>10} {'difference':>11} {'deviations':>11}"
    )
    lines = [
        f"{name}: test {measure.name}; dense runs are from {min(dense):.2f} to {max(dense):.2f}",
        f"{header} {'last step':>12} {'ratio':>7}",
    ]
    for method, group in runs.items():
        final = [run["final"] for run in group]
        difference = statistics.mean(final) - statistics.mean(dense)
        last = group[0]["sent_last"]
        lines.append(
            f"{method:<{width}} {statistics.mean(final):>8.2f} {statistics.stdev(final):>10.2f}"
            f" {difference:>+11.2f} {difference / (statistics.stdev(dense) or math.nan):>+11.1f}"
            f" {human_bytes(last):>12} {group[0]['dense'] / last:>6.0f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    parser.add_argument("--compression", nargs="+", default=["dgc", "dgc:compact"])
    parser.add_argument("--seeds", type=int, default=5)
    for field in Settings._fields:
        kind = int if "epochs" in field else float
        help = "instead of the task's own" if field != "density" else "of methods that name none"
        parser.add_argument(f"--{field.replace('_', '-')}", type=kind, help=help)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--results", type=Path, default=Path("results/accuracy.json"))
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds must be 2 or more: there is no spread of one run")
    given = {f: getattr(options, f) for f in Settings._fields if getattr(options, f) is not None}
    wanted = {
        name: {
            method: [
                Wanted(name, TASKS[name].settings._replace(**given), method, seed)
                for seed in range(options.seeds)
            ]
            for method in ["none", *(m for m in options.compression if m != "none")]
        }
        for name in options.tasks
    }
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    every = [run for methods in wanted.values() for group in methods.values() for run in group]
    missing = [run for run in every if run.key() not in known]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        found = pool.imap(train, missing)
        for run, end in zip(missing, tqdm(found, total=len(missing), unit="run"), strict=True):
            known[run.key()] = end
            options.results.write_text(json.dumps(known, indent=1) + "\n")
    for name, methods in wanted.items():
        runs = {method: [known[run.key()] for run in group] for method, group in methods.items()}
        print(f"\n{table(name, runs)}")


if __name__ == "__main__":
    main()
