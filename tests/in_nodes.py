"""Training of four ranks as two nodes of two: a model and its reference in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvd_compress.engines.lockstep import World
from hvd_compress.methods import as_compressor
from tests.devices import DEVICE

NODES, OF_A_NODE = 2, 2
#: methods and the momentum that they take over, which follow :func:`lockstep`
FOLLOWING = (
    ("none", 0.0),
    ("topk:density=0.05", 0.0),
    ("randomk:density=0.1", 0.0),
    ("onebit:column=16", 0.0),
    ("dgc:density=0.05,min_size=0", 0.9),
    ("powersgd:rank=2", 0.0),
)
#: what these begin with, if they have the bits of it
SAME_BITS = ("topk", "randomk", "dgc")
Loss = Callable[[torch.nn.Module, int, int], torch.Tensor]


class _Model(torch.nn.Module):
    """Sizes that two ranks cannot divide evenly; of the last one the first rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(40, 33)
        self.head = torch.nn.Linear(33, 5)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x).tanh()) * self.scale


def uneven_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return _Model().to(DEVICE)


def cut(x: Any) -> list[Any]:
    """An array or tensor as the ranks of a node divide it."""
    units = x if x.ndim > 1 and len(x) >= OF_A_NODE else x.reshape(-1)
    bounds = [len(units) * i // OF_A_NODE for i in range(OF_A_NODE + 1)]
    return [units[i:j] for i, j in itertools.pairwise(bounds)]


def gradients_of(
    model: torch.nn.Module, node: int, step: int, loss: Loss, ranks: int = OF_A_NODE
) -> dict[str, Any]:
    """The mean of the gradients of a node's ranks, of which there are so many."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(ranks * node, ranks * (node + 1)):
        model.zero_grad()
        loss(model, rank, step).backward()
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] = total[name] + p.grad if name in total else p.grad.clone()
    return {name: x / ranks for name, x in total.items()}


def lockstep(
    method: Any,
    steps: int,
    loss: Loss,
    momentum: float = 0.0,
    model: torch.nn.Module | None = None,
    nodes: int = NODES,
    cut: Callable[[Any], list[Any]] = cut,
) -> torch.nn.Module:
    """The model after training in one process: means of the nodes' gradients, cut into as many
    parts as a node has ranks, of which each meets those of the other nodes."""
    model, ranks = model or uneven_model(), len(cut(np.empty(1)))
    worlds = [World(as_compressor(method), nodes) for _ in range(ranks)]
    for step in range(steps):
        means = []
        for node in range(nodes):
            mean = gradients_of(model, node, step, loss, ranks)
            means.append({name: cut(x.cpu().numpy()) for name, x in mean.items()})
        shards = []
        for place, world in enumerate(worlds):
            theirs = [
                {name: parts[place] for name, parts in mean.items() if parts[place].size}
                for mean in means
            ]
            outcomes = world.exchange_all(theirs, momentum=momentum)[0]
            shards.append({name: outcome.direction for name, outcome in outcomes.items()})
        for name, p in model.named_parameters():
            parts = [np.ravel(own[name]) for own in shards if name in own]
            direction = torch.from_numpy(np.concatenate(parts)).view(p.shape)
            with torch.no_grad():
                p.add_(direction.to(DEVICE), alpha=-0.05)
    return model
