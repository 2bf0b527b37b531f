"""Accuracy with compression: digits and texts, every method from several seeds.

    python -m mpi_examples.accuracy
    python -m mpi_examples.accuracy --tasks lstm --compression dgc topk --density 0.01 --seeds 3
    python -m mpi_examples.accuracy --tasks digits --compression sparse_loco:sync_every=15

All ranks are inside one process, one after the other (``hvd_compress.engines.lockstep``), which on
one machine takes a fraction of a job's time.  Models and data are those of train_digits.py and
train_text.py.  Results are kept in ``--results`` and not trained again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from hvd_compress import Compressor
from hvd_compress.cli.options import parser_of
from hvd_compress.engines.lockstep import World
from hvd_compress.stats import human_bytes
from hvd_compress.systems.base import StepContext
from mpi_examples.data import columns, digits, segments, standard_library
from mpi_examples.demo import compressor
from mpi_examples.models import LSTM, Transformer, cnn
from mpi_examples.report import ACCURACY, PERPLEXITY, Measure
from mpi_examples.study import half_width, training_method, warmed_up

RANKS, MOMENTUM = 4, 0.9
Batch = list[Any]  # of every rank


class Settings(NamedTuple):
    """The options of one task; the command line can replace each."""

    lr: float
    epochs: int
    warmup_epochs: int
    density: float  # where the method names none
    clip: float | None = None
    ranks: int = RANKS
    momentum: float = MOMENTUM


class Digits:
    """As in train_digits.py, with half its epochs and no weight decay."""

    measure: ClassVar[Measure] = ACCURACY
    settings: ClassVar[Settings] = Settings(0.05, epochs=15, warmup_epochs=4, density=0.001)

    def __init__(self, seed: int, ranks: int = RANKS) -> None:
        self.x, self.x_test, self.y, self.y_test = map(torch.from_numpy, digits(seed))
        self.model: torch.nn.Module = cnn((1, 8, 8), 10)
        self.ranks, self.of_a_rank = ranks, 16

    def batches(self, random: np.random.Generator) -> Iterator[Batch]:
        order = torch.from_numpy(random.permutation(len(self.x)))
        for batch in order.split(self.ranks * self.of_a_rank)[:-1]:
            yield [(self.x[mine], self.y[mine]) for mine in batch.split(self.of_a_rank)]

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
    width: ClassVar[int] = 128

    def __init__(self, seed: int, ranks: int = RANKS) -> None:
        self.text = _corpus()
        self.model = self.make(self.text.words, self.width, 16, 0.0)
        self.ranks = ranks
        self.states: list[Any] = []

    def batches(self, random: np.random.Generator) -> Iterator[Batch]:
        text = np.roll(self.text.train, random.integers(len(self.text.train)))
        self.states, count = [None] * self.ranks, 32 // self.ranks
        parts = [segments(columns(text, count, rank, self.ranks), 16) for rank in range(self.ranks)]
        return map(list, zip(*parts, strict=True))

    def losses(self, batch: Batch) -> Iterator[torch.Tensor]:
        for rank, (words, following) in enumerate(batch):
            logits, self.states[rank] = self.model(words, self.states[rank])
            yield functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def score(self) -> float:
        return math.exp(self.test_loss())

    def test_loss(self) -> float:
        total, count, state = 0.0, 0, None
        for words, following in segments(columns(self.text.test, 32, 0, 1), 16):
            logits, state = self.model(words, state)
            loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten())
            total, count = total + loss.item() * following.numel(), count + following.numel()
        return total / count


class TransformerText(Text):
    settings: ClassVar[Settings] = Text.settings._replace(lr=1.0)
    make = Transformer


_corpus = functools.cache(standard_library)
TASKS: dict[str, Any] = {
    "digits": Digits,
    "lstm": Text,
    "transformer": TransformerText,
}


class Wanted(NamedTuple):
    """One run."""

    task: str
    settings: Settings
    method: str
    seed: int

    def key(self) -> str:
        options = " ".join(f"{name}={value}" for name, value in self.settings._asdict().items())
        return f"{self.task} {self.method} seed={self.seed} {options}"


def train(run: Wanted) -> dict[str, Any]:
    """The result of a run, what it had after each epoch, and the bytes that rank 0 sent: a step,
    and in the last."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    settings = run.settings
    task = TASKS[run.task](run.seed, settings.ranks)
    trainer = (RoundsTrainer if training_method(run.method) else Trainer)(task, run)
    scores, done, sent = [], 0, 0
    warmup = settings.warmup_epochs / settings.epochs
    for epoch in range(settings.epochs):
        batches = list(task.batches(np.random.default_rng([run.seed, epoch])))
        world = trainer.world
        for step, batch in enumerate(batches):
            world.epoch = epoch + step / len(batches)
            before = world.record.bytes_sent
            trainer.step(batch, settings.lr * warmed_up(world.epoch / settings.epochs, warmup))
            sent = world.record.bytes_sent - before
            done += 1
        task.model.eval()
        with torch.no_grad(), trainer.tested():
            scores.append(task.score())
        task.model.train()
    dense = 4 * sum(p.numel() for p in task.model.parameters())
    whole = world.record.bytes_sent / done
    with torch.no_grad():
        loss = task.test_loss()
    return {
        **{"final": scores[-1], "scores": scores, "test_loss": loss},
        **{"sent": whole, "sent_last": sent if trainer.every_step else whole},
        **{"dense": dense, "steps": done},
    }


class Trainer:
    """SGD with Nesterov momentum, the optimizer's or the method's."""

    every_step = True  # there is an exchange

    def __init__(self, task: Any, run: Wanted) -> None:
        self.task, self.settings = task, run.settings
        self.parameters = dict(task.model.named_parameters())
        self.method = self.of(run)
        self.world = World(self.method, run.settings.ranks, fused=True)
        momentum = run.settings.momentum
        self.inside = momentum if self.method.takes_momentum else 0.0
        self.optimizer = self.beside(momentum - self.inside)

    def of(self, run: Wanted) -> Compressor:
        settings = run.settings
        method = compressor(run.method, settings.density, settings.warmup_epochs)
        self.clips = settings.clip is not None
        if self.clips and hasattr(method, "clip_norm"):
            self.clips = False  # it does so before anything is accumulated
            return dataclasses.replace(method, clip_norm=settings.clip)
        return method

    def beside(self, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.parameters.values(), self.settings.lr, momentum, nesterov=momentum > 0
        )

    def gradients(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """The batches of every rank."""
        for loss in self.task.losses(batch):
            for p in self.parameters.values():
                p.grad = None
            loss.backward()
            yield {n: p.grad for n, p in self.parameters.items()}

    def step(self, batch: Batch, lr: float) -> None:
        options = {"momentum": self.inside, "nesterov": self.inside > 0}
        found = self.world.exchange_all(list(self.gradients(batch)), **options)[0]
        for n, p in self.parameters.items():
            p.grad = found[n].direction
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()

    def tested(self) -> contextlib.AbstractContextManager[None]:
        """The model has the weights that one would deploy."""
        return contextlib.nullcontext()


class RoundsTrainer(Trainer):
    """Each rank takes local steps of SGD, and in some of them all meet, as DiLoCo does."""

    every_step = False

    def of(self, run: Wanted) -> Compressor:
        self.system = training_method(run.method)
        self.clips = run.settings.clip is not None
        weights = {n: p.data for n, p in self.parameters.items()}
        self.ranks = range(run.settings.ranks)
        self.weights: list[Any] = [{n: w.clone() for n, w in weights.items()} for _ in self.ranks]
        self.states = [self.system.init(own) for own in self.weights]
        self.momenta: list[Any] = [defaultdict(dict) for _ in self.ranks]
        self.count = 0
        return self.system.compression

    def step(self, batch: Batch, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr
        losses = self.task.losses(batch)
        for weights, momenta in zip(self.weights, self.momenta, strict=True):
            self.optimizer.state = momenta
            for n, p in self.parameters.items():
                p.data, p.grad = weights[n], None
            next(losses).backward()
            if self.clips:
                torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.clip)
            self.optimizer.step()
        self.count += 1
        if self.system.exchange_after(self.count) is None:
            return
        own = zip(self.weights, self.states, strict=True)
        outcomes = self.world.exchange_all([self.system.sent(w, state) for w, state in own])
        context = StepContext(self.count, size=len(self.ranks))
        for rank, found in enumerate(outcomes):
            means = {n: outcome.mean for n, outcome in found.items()}
            self.weights[rank], self.states[rank] = self.system.received(
                means, self.weights[rank], self.states[rank], context
            )

    @contextlib.contextmanager
    def tested(self) -> Iterator[None]:
        for n, p in self.parameters.items():
            p.data = torch.stack([own[n] for own in self.weights]).mean(0)
        yield


def table(name: str, runs: dict[str, list[dict[str, float]]]) -> str:
    """One row a method: mean, half its 95 % confidence interval and standard deviation, by how much
    the mean differs from that of the dense runs, also in the deviations of these, and the bytes of
    the last step."""
    measure = TASKS[name].measure
    dense = [run["final"] for run in runs["none"]]
    width = max(map(len, runs))
    header = (
        f"{'method':<{width}} {'mean':>8} {'+- 95 %':>8} {'deviation':>10} {'difference':>11}"
        f" {'deviations':>11}"
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
            f"{method:<{width}} {statistics.mean(final):>8.2f} {half_width(final):>8.2f}"
            f" {statistics.stdev(final):>10.2f}"
            f" {difference:>+11.2f} {difference / (statistics.stdev(dense) or math.nan):>+11.1f}"
            f" {human_bytes(last):>12} {group[0]['dense'] / last:>6.0f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    parser.add_argument("--compression", nargs="+", default=["dgc", "dgc:compact"])
    parser.add_argument("--seeds", type=int, default=5)
    for field in Settings._fields:
        kind = int if field == "ranks" or "epochs" in field else float
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
