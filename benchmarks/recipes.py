"""Recipes of benchmarks/quality.py, and how all ranks of one process train by them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from benchmarks.quality import RANKS, WARM_UP, Training
from hvd_compress import Compressor, PowerSGD, as_compressor, optimizers, warmup_to
from hvd_compress.engines.lockstep import World
from hvd_compress.optimizers import Now
from hvd_compress.systems import Ranks
from mpi_examples.data import mnist, mnist_cache, mnist_folder, share
from mpi_examples.models import Transformer, perceptron
from mpi_examples.study import rate, training_method

Batch = tuple[torch.Tensor, torch.Tensor]
LENGTH = 64  # of the texts that the transformer reads


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained at one horizon; more steps for a longer one."""

    model: Callable[[], torch.nn.Module]
    #: a batch of each rank, without end, given a seed
    batches: Callable[[int], Iterator[list[Batch]]]
    #: (loss of a batch, its score)
    loss: Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]
    #: what the model is tested with, in parts of one size
    tests: Callable[[], Iterator[Batch]]
    #: makes the optimizer, given the parameters and the learning rate
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    lr: float
    steps: int
    steps_per_epoch: int
    clip: float | None = None


def texts(file: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and to test with: the last eighth of a file, or every eighth module of
    this Python's library."""
    if file is not None:
        text = np.frombuffer(file.read_bytes(), np.uint8)
        if len(text) < 16 * LENGTH:
            raise SystemExit(f"--data: {file} has {len(text)} bytes, {16 * LENGTH} are needed")
        return text[: len(text) * 7 // 8], text[len(text) * 7 // 8 :]
    files = [f.read_bytes() for f in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    parts = (b"".join(f for i, f in enumerate(files) if (i % 8 == 1) == test) for test in (0, 1))
    train, test = (np.frombuffer(part, np.uint8) for part in parts)
    return train, test


def of_bytes(file: Path | None) -> Recipe:
    train, test = texts(file)

    def pieces(text: np.ndarray, random: np.random.Generator, batch: int) -> list[Batch]:
        parts = []
        for starts in random.integers(len(text) - LENGTH, size=(RANKS, batch)):
            found = np.stack([text[at : at + LENGTH + 1] for at in starts], 1).astype(np.int64)
            parts.append((torch.from_numpy(found[:-1]), torch.from_numpy(found[1:])))
        return parts

    def batches(seed: int) -> Iterator[list[Batch]]:
        random = np.random.default_rng(seed)
        while True:
            yield pieces(train, random, 4)

    def tests() -> Iterator[Batch]:
        random = np.random.default_rng(0)
        for _ in range(10):
            yield from pieces(test, random, 64)

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _ = model(batch[0], None)
        found = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return found, found / math.log(2)  # bits per byte

    def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.1)

    more = {"lr": 4e-3, "steps": 1200, "steps_per_epoch": 120, "clip": 1.0}
    model = functools.partial(Transformer, 256, 96, LENGTH, 0.0, layers=3)
    return Recipe(model, batches, loss, tests, adamw, **more)


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for matrices between layers, AdamW for all else, as models are trained with Muon."""

    def __init__(self, parameters: Any, lr: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr})
        first, *others = [p for group in self.param_groups for p in group["params"]]
        matrices = [p for p in others if p.ndim == 2]
        rest = [first, *(p for p in others if p.ndim != 2)]  # the first are the embeddings
        self.parts = (
            torch.optim.Muon(matrices, lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.1),
        )

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            part.step()


def with_muon(file: Path | None) -> Recipe:
    return dataclasses.replace(of_bytes(file), optimizer=MuonAndAdamW)


def of_mnist(file: Path | None) -> Recipe:
    x, x_test, y, y_test = map(torch.from_numpy, mnist(mnist_folder(str(mnist_cache()))))

    def batches(seed: int) -> Iterator[list[Batch]]:
        for epoch in itertools.count():
            shares = [share(len(x), seed, epoch, rank, RANKS, 32) for rank in range(RANKS)]
            for step in zip(*shares, strict=True):
                yield [(x[mine], y[mine]) for mine in step]

    def tests() -> Iterator[Batch]:
        yield x_test, y_test

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(batch[0])
        right = (logits.argmax(1) == batch[1]).float().mean()
        return functional.cross_entropy(logits, batch[1]), 100 * right

    def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)

    model = functools.partial(perceptron, 784, 64, 32, 10)
    return Recipe(model, batches, loss, tests, sgd, lr=0.05, steps=6 * 468, steps_per_epoch=468)


RECIPES: dict[str, Callable[[Path | None], Recipe]] = {
    "bytes": functools.cache(of_bytes),
    "bytes-muon": functools.cache(with_muon),
    "mnist": functools.cache(of_mnist),
}


class Gradients:
    """Ranks that average their gradients by a method, and step alike."""

    def __init__(self, recipe: Recipe, text: str, model: torch.nn.Module, steps: int) -> None:
        self.recipe, self.model = recipe, model
        self.parameters = dict(model.named_parameters())
        self.optimizer = recipe.optimizer(self.parameters.values(), recipe.lr)
        group = self.optimizer.param_groups[0]
        method = with_warm_up(text, steps)
        #: as the averages are, where nothing stands before them
        self.clip = recipe.clip
        if recipe.clip and hasattr(method, "clip_norm"):
            method, self.clip = dataclasses.replace(method, clip_norm=recipe.clip), None
        self.momentum: dict[str, Any] = {}
        if method.takes_momentum and (m := group.get("momentum")):
            self.momentum = {"momentum": m, "nesterov": group["nesterov"]}
            group.update(momentum=0.0, nesterov=False)
        self.world = World(method, RANKS, fused=True)

    @property
    def sent(self) -> int:
        """The bytes that rank 0 has sent."""
        return self.world.record.bytes_sent

    def own(self, batch: Sequence[Batch]) -> Iterator[dict[str, Any]]:
        """The gradients of every rank."""
        for mine in batch:
            self.model.zero_grad()
            self.recipe.loss(self.model, mine)[0].backward()
            yield {n: p.grad for n, p in self.parameters.items()}

    def clipped(self, batch: Sequence[Batch]) -> Iterator[dict[str, Any]]:
        """The same, each clipped by its rank, where what is averaged are no gradients."""
        for gradients in self.own(batch):
            if self.recipe.clip:
                most = self.recipe.clip * math.sqrt(RANKS)  # as a rank's own norm is larger
                torch.nn.utils.clip_grad_norm_(self.parameters.values(), most)
            yield gradients

    def step(self, batch: Sequence[Batch], lr: float) -> None:
        found = self.world.exchange_all(list(self.own(batch)), **self.momentum)[0]
        for n, p in self.parameters.items():
            p.grad = found[n].direction
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.clip)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()

    def end(self) -> None:
        """Give the model the weights that one would deploy."""


class OneBit(Gradients):
    """1-bit Adam, whose variance is frozen after a fifth of the steps."""

    def __init__(self, recipe: Recipe, text: str, model: torch.nn.Module, steps: int) -> None:
        super().__init__(recipe, "none", model, steps)
        group = self.optimizer.param_groups[0]
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        self.formula = optimizers.OneBitAdam(freeze_step=max(steps // 5, 1), **options)
        self.states: dict[str, Any] = {n: {} for n in self.parameters}
        self.count = 0
        self.world = World(self.formula.compressor(), RANKS, fused=True)

    def step(self, batch: Sequence[Batch], lr: float) -> None:
        found = self.world.exchange_all(list(self.clipped(batch)))[0]
        self.count += 1
        learnt = min(self.count, self.formula.freeze_step)
        frozen = self.count > learnt
        now = Now(self.count, learnt, frozen, is_momentum=frozen)
        formula = dataclasses.replace(self.formula, lr=lr)
        with torch.no_grad():
            for n, p in self.parameters.items():
                g = found[n].direction
                p.data, self.states[n] = formula.step(p.data, g, self.states[n], now)


class Rounds:
    """Ranks that step by themselves, and meet in some steps."""

    def __init__(self, recipe: Recipe, text: str, model: torch.nn.Module, steps: int) -> None:
        self.recipe, self.model = recipe, model
        self.models = [copy.deepcopy(model) for _ in range(RANKS)]
        self.optimizers = [recipe.optimizer(own.parameters(), recipe.lr) for own in self.models]
        self.world = Ranks(training_method(text), RANKS)

    @property
    def sent(self) -> int:
        """The bytes that rank 0 has sent."""
        return self.world.bytes_sent

    def step(self, batch: Sequence[Batch], lr: float) -> None:
        for model, mine in zip(self.models, batch, strict=True):
            model.zero_grad()
            self.recipe.loss(model, mine)[0].backward()
            if self.recipe.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.recipe.clip)
        self.met(self.world.before_step(self.weights(), rates=dict.fromkeys(self.names, lr)))
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
        self.met(self.world.after_step(self.weights()))

    @property
    def names(self) -> list[str]:
        return [n for n, _ in self.model.named_parameters()]

    def weights(self) -> list[dict[str, Any]]:
        return [{n: p.detach().clone() for n, p in m.named_parameters()} for m in self.models]

    def met(self, weights: Sequence[dict[str, Any]]) -> None:
        with torch.no_grad():
            for model, own in zip(self.models, weights, strict=True):
                for n, p in model.named_parameters():
                    p.copy_(own[n])

    def end(self) -> None:
        self.met(self.world.consensus(self.weights()))
        self.model.load_state_dict(self.models[0].state_dict())


def with_warm_up(text: str, steps: int) -> Compressor:
    """Return a method of a training of so many steps, from its row."""
    method = as_compressor(text.removesuffix(WARM_UP))
    if not text.endswith(WARM_UP):
        return method
    if isinstance(method, PowerSGD):
        return dataclasses.replace(method, start=max(steps // 10, 1))
    density = warmup_to(method.density, steps=max(steps // 4, 1))
    return dataclasses.replace(method, density=density)


def train(run: Training, file: Path | None) -> dict[str, Any]:
    """Return what a run ends with."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    recipe = RECIPES[run.recipe.partition("(")[0]](file)
    recipe = dataclasses.replace(recipe, lr=recipe.lr * run.factor)
    steps = max(round(recipe.steps * run.horizon), 1)
    model = recipe.model()
    kind: Any = OneBit if run.method == "onebit_adam" else Gradients
    if training_method(run.method):
        kind = Rounds
    ranks = kind(recipe, run.method, model, steps)
    start, batches = time.perf_counter(), recipe.batches(run.seed)
    for step in range(steps):
        ranks.world.epoch = step / recipe.steps_per_epoch
        ranks.step(next(batches), recipe.lr * rate(step / steps))
    seconds, sent = time.perf_counter() - start, ranks.sent
    ranks.end()  # where models meet once more, to be tested
    with torch.no_grad():
        model.eval()
        loss, score = (
            torch.stack([torch.stack(recipe.loss(model, batch)) for batch in recipe.tests()])
            .mean(0)
            .tolist()
        )
    return {
        "loss": loss if math.isfinite(loss) else math.inf,  # it diverged, and no other is worse
        "score": score,
        "sent": sent / steps,
        "steps": steps,
        "dense": 4 * sum(p.numel() for p in model.parameters()),
        "seconds": round(seconds, 1),
    }
