"""A small model, data that differ by rank, and two references that know nothing of Horovod."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_compress.engines.lockstep import World
from tests.devices import DEVICE
from tests.scenarios.driver import hvd

Model = torch.nn.Module
LR = 0.05


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 32),
        torch.nn.Tanh(),
        torch.nn.Linear(32, 5),
    )
    return model.to(DEVICE, dtype)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 40, generator=generator)
    return x.to(DEVICE), (x[:, :5] + 0.5 * x[:, 5:10]).argmax(1).to(DEVICE)


def loss_of(model: Model, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    dtype = next(model.parameters()).dtype
    return torch.nn.functional.cross_entropy(model(x.to(dtype)).float(), y)


def sgd(model: Model, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **{"lr": LR, "momentum": 0.9, **options})


def distribute(optimizer: Any, model: Model, compression: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression, **options
    )


def train(model: Model, optimizer: Any, steps: Iterable[int], rank: int | None = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, hvd.rank() if rank is None else rank, step).backward()
        optimizer.step()


def dense_reference(
    model: Model, optimizer: Any, steps: Iterable[int], ranks: int | None = None
) -> None:
    """Plain training in this process alone, on the average of all ranks' gradients."""
    ranks = hvd.size() if ranks is None else ranks
    for step in steps:
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in range(ranks)) / ranks).backward()
        optimizer.step()


def lockstep_reference(
    model: Model,
    compressor: Any,
    steps: int,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    direction: Callable[[str, torch.nn.Parameter, torch.Tensor], torch.Tensor] = lambda n, p, g: g,
) -> World:
    """Compressed training of all ranks in this process: exchanges in the lockstep world, and
    ``w = w - lr * direction``."""
    world = World(compressor, hvd.size())
    for step in range(steps):
        gradients = []
        for rank in range(hvd.size()):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, p in model.named_parameters():
            outcome = world.exchange(
                [g[name] for g in gradients], name=name, momentum=momentum, nesterov=nesterov
            )[hvd.rank()]
            with torch.no_grad():
                p.add_(direction(name, p, outcome.direction), alpha=-LR)  # as SGD rounds
    return world


def assert_close(model: Model, other: Model, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_everywhere(
    tensors: Model | Iterable[torch.Tensor], process_set: Any = None
) -> None:
    """All ranks hold the same bits."""
    if isinstance(tensors, torch.nn.Module):
        tensors = tensors.parameters()
    data = b"".join(
        t.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors
    )
    digest = torch.tensor(list(hashlib.sha256(data).digest()), dtype=torch.uint8)
    options = {} if process_set is None else {"process_set": process_set}
    digests = hvd.allgather(digest, name="digest", **options).view(-1, 32)
    assert (digests == digests[0]).all(), "ranks diverged"
