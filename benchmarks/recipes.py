"""Recipes of benchmarks/quality.py; only ranks import them, since that starts MPI."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
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
from benchmarks.quality import Training
from hvd_compress import as_compressor
from mpi_examples.models import Transformer
from mpi_examples.study import rate, training_method

Batch = tuple[torch.Tensor, torch.Tensor]
WORLD = MPI.COMM_WORLD
LENGTH = 64  # of the texts that the transformer reads


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

    def pieces(text: np.ndarray, random: np.random.Generator, batch: int) -> Batch:
        starts = random.integers(len(text) - LENGTH, size=(WORLD.size, batch))[WORLD.rank]
        found = np.stack([text[at : at + LENGTH + 1] for at in starts], 1).astype(np.int64)
        return torch.from_numpy(found[:-1]), torch.from_numpy(found[1:])

    def batches(seed: int) -> Iterator[Batch]:
        random = np.random.default_rng(seed)
        while True:
            yield pieces(train, random, 4)

    def tests() -> Iterator[Batch]:
        random = np.random.default_rng(0)
        for _ in range(10):
            yield pieces(test, random, 64)

    def loss(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits, _ = model(batch[0], None)
        found = functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return found, found / math.log(2)  # bits per byte

    def adamw(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr, betas=(0.9, 0.95), weight_decay=0.1)

    more = {"lr": 4e-3, "steps": 1200, "steps_per_epoch": 120, "clip": 1.0}
    model = functools.partial(Transformer, 256, 96, LENGTH, 0.0, layers=3)
    return Recipe(model, batches, loss, tests, adamw, **more)


RECIPES: dict[str, Callable[[Path | None], Recipe]] = {"bytes": functools.cache(of_bytes)}


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


def train(run: Training, file: Path | None) -> dict[str, Any]:
    """Return what a run ends with; the same on all ranks."""
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    recipe = RECIPES[run.recipe.partition("(")[0]](file)
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
        optimizer.param_groups[0]["lr"] = recipe.lr * rate(step / steps)
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
    loss = loss if math.isfinite(loss) else math.inf  # it diverged, and no other is worse
    return {
        **{"loss": loss, "score": score, "sent": sent / steps, "steps": steps},
        **{"dense": 4 * sum(p.numel() for p in model.parameters()), "seconds": seconds},
    }
