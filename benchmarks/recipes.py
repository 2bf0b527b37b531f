"""What benchmarks/quality.py trains; only ranks import it, since it starts MPI."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from benchmarks.quality import Run
from hvd_compress import as_compressor
from hvd_compress.config import build, lookup, names
from mpi_examples import data

Batch = tuple[torch.Tensor, torch.Tensor]
WORLD = MPI.COMM_WORLD


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained at one horizon; more steps for a longer one."""

    model: Callable[[], torch.nn.Module]
    #: batches of this rank, without end, given a seed
    batches: Callable[[int], Iterator[Batch]]
    #: (loss of a batch, its score)
    loss: Callable[[torch.nn.Module, Batch], tuple[torch.Tensor, torch.Tensor]]
    #: what the model is tested with, this rank's part
    tests: Callable[[], Iterator[Batch]]
    #: makes the optimizer, given the parameters and the learning rate
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    lr: float
    steps: int
    steps_per_epoch: int
    warmup: float = 0.05  # share of the steps
    end: float = 0.1  # of the learning rate
    clip: float | None = None

    def rate(self, done: float) -> float:
        """Return the learning rate when that share of the steps is done."""
        if done < self.warmup:
            return self.lr * (0.1 + 0.9 * done / self.warmup)
        rest = (done - self.warmup) / (1 - self.warmup)
        return self.lr * (self.end + (1 - self.end) * (1 + math.cos(math.pi * rest)) / 2)


class Bytes(torch.nn.Module):
    """A small transformer over bytes: 3 layers of 96, 0.37 million parameters."""

    width, layers, length, heads = 96, 3, 64, 4

    def __init__(self) -> None:
        super().__init__()
        width = self.width
        self.embedding = torch.nn.Embedding(256, width)
        self.position = torch.nn.Parameter(0.02 * torch.randn(self.length, width))
        layer = torch.nn.TransformerEncoderLayer(
            *(width, self.heads, 4 * width),
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = torch.nn.TransformerEncoder(
            layer, self.layers, norm=torch.nn.LayerNorm(width), enable_nested_tensor=False
        )
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(self.length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits for the byte after each, for bytes of shape (batch, length)."""
        hidden = self.embedding(x) + self.position
        return self.blocks(hidden, self.mask, is_causal=True) @ self.embedding.weight.T


def texts(file: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and to test with: the last eighth of a file, or every eighth module of
    this Python's library."""
    if file is not None:
        text = np.frombuffer(file.read_bytes(), np.uint8)
        return text[: len(text) * 7 // 8], text[len(text) * 7 // 8 :]
    files = [f.read_bytes() for f in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    parts = (b"".join(f for i, f in enumerate(files) if (i % 8 == 1) == test) for test in (0, 1))
    train, test = (np.frombuffer(part, np.uint8) for part in parts)
    return train, test


def of_bytes(file: Path | None) -> Recipe:
    train, test = texts(file)

    def pieces(text: np.ndarray, random: np.random.Generator, batch: int) -> Batch:
        starts = random.integers(len(text) - Bytes.length, size=(WORLD.size, batch))[WORLD.rank]
        found = np.stack([text[at : at + Bytes.length + 1] for at in starts]).astype(np.int64)
        return torch.from_numpy(found[:, :-1]), torch.from_numpy(found[:, 1:])

    def batches(seed: int) -> Iterator[Batch]:
        random = np.random.default_rng(seed)
        while True:
            yield pieces(train, random, 4)

    def tests() -> Iterator[Batch]:
        random = np.random.default_rng(0)
        for _ in range(10):
            yield pieces(test, random, 64)

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
        return found, found / math.log(2)  # bits per byte

    def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.1)

    more = {"lr": 4e-3, "steps": 1200, "steps_per_epoch": 120, "clip": 1.0}
    return Recipe(Bytes, batches, loss, tests, adamw, **more)


def of_mnist(file: Path | None) -> Recipe:
    x, x_test, y, y_test = map(torch.from_numpy, data.mnist(data.mnist_cache()))
    batch = 32

    def batches(seed: int) -> Iterator[Batch]:
        epoch = 0
        while True:
            for rows in data.share(len(x), seed, epoch, WORLD.rank, WORLD.size, batch):
                yield x[rows], y[rows]
            epoch += 1

    def tests() -> Iterator[Batch]:
        mine = slice(WORLD.rank, None, WORLD.size)
        yield from zip(x_test[mine].split(500), y_test[mine].split(500), strict=True)

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(batch[0])
        right = (logits.argmax(1) == batch[1]).float().mean()
        return functional.cross_entropy(logits, batch[1]), 100 * right

    def model() -> torch.nn.Module:
        widths = (28 * 28, 64, 32, 10)
        layers = [torch.nn.Linear(*ends) for ends in itertools.pairwise(widths)]
        relus = [torch.nn.ReLU() for _ in layers[1:]]
        pairs = itertools.zip_longest(layers, relus)
        return torch.nn.Sequential(torch.nn.Flatten(), *filter(None, itertools.chain(*pairs)))

    epoch = len(x) // WORLD.size // batch
    more = {"lr": 0.05, "steps": 6 * epoch, "steps_per_epoch": epoch, "end": 0.0}
    return Recipe(model, batches, loss, tests, sgd, **more)


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)


RECIPES: dict[str, Callable[[Path | None], Recipe]] = {
    "bytes": functools.cache(of_bytes),
    "mnist": functools.cache(of_mnist),
}


def training_method(text: str) -> Any:
    """Return the way to train with local steps that a text such as "diloco:sync_every=8" names, or
    ``None`` if it names none."""
    name, _, options = text.partition(":")
    if name not in names("training"):
        return None
    pairs = [option.split("=", 1) for option in options.split(",") if option]
    return build(lookup("training", name), {n: number(x) for n, x in pairs})


def number(text: str) -> Any:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def distributed(recipe: Recipe, text: str, model: torch.nn.Module, steps: int) -> Any:
    """Return the optimizer of a method, as users write it."""
    plain = functools.partial(recipe.optimizer, model.parameters())
    named = {"named_parameters": model.named_parameters()}
    if method := training_method(text):
        return hvd.DistributedOptimizer(plain(recipe.lr), method=method, **named)
    method = as_compressor(text)
    if method.partner is None:
        if recipe.clip and hasattr(method, "clip_norm"):
            method = dataclasses.replace(method, clip_norm=recipe.clip)
        return hvd.DistributedOptimizer(plain(recipe.lr), compression=method, **named)
    group = plain(recipe.lr).param_groups[0]
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    freeze = "freeze_step" if method.partner == "OneBitAdam" else "var_freeze_step"
    partner = getattr(hvd, method.partner)(
        model.parameters(), **options, **{freeze: max(steps // 5, 1)}
    )
    return hvd.DistributedOptimizer(partner, compression=partner.compressor(), **named)


def train(run: Run, file: Path | None) -> dict[str, Any]:
    """Return what a run ends with; the same on all ranks."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    recipe = RECIPES[run.recipe](file)
    recipe = dataclasses.replace(recipe, lr=recipe.lr * run.factor)
    steps = max(round(recipe.steps * run.horizon), 1)
    model = recipe.model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = distributed(recipe, run.method, model, steps)
    is_local = hasattr(optimizer, "training")
    owner = optimizer.training if is_local else optimizer.compression
    clips = recipe.clip if not hasattr(owner.method, "clip_norm") else None
    start, batches = time.perf_counter(), recipe.batches(run.seed)
    for step in range(steps):
        owner.set_epoch(step / recipe.steps_per_epoch)
        optimizer.param_groups[0]["lr"] = recipe.rate(step / steps)
        optimizer.zero_grad()
        recipe.loss(model, next(batches))[0].backward()
        taken: Any = contextlib.nullcontext()
        if clips is not None:
            if not is_local:
                optimizer.synchronize()
                taken = optimizer.skip_synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clips)
        with taken:
            optimizer.step()
    total = owner.stats().total
    sent, seconds = WORLD.allreduce(total.bytes_sent) / WORLD.size, time.perf_counter() - start
    if hasattr(optimizer, "synchronize_parameters"):
        optimizer.synchronize_parameters()
    with torch.no_grad():
        model.eval()
        found = [torch.stack(recipe.loss(model, batch)) for batch in recipe.tests()]
    loss, score = (WORLD.allreduce(torch.stack(found).mean(0).numpy()) / WORLD.size).tolist()
    return {
        **{"loss": loss, "score": score, "sent": sent / steps, "steps": steps},
        **{"dense": 4 * sum(p.numel() for p in model.parameters()), "seconds": seconds},
    }
