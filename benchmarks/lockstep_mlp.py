"""Trains a network of linear layers with several ranks at once, in NumPy: for studies of many runs.

All ranks' gradients are made by one multiplication a layer, and the matrices of all ranks are one
bucket of the loops in hvd_compress.kernels: a step takes a third of what the ranks of
``hvd_compress.engines.lockstep`` take, which run one after the other and exchange real messages.
Their directions have the same bits (tests/methods/test_lockstep_mlp.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hvd_compress import DGC, Compressor, NoCompression, TopK
from hvd_compress.base import Outcome
from hvd_compress.engines.lockstep import World
from hvd_compress.kernels import Column, Selection, Steps, add_up
from hvd_compress.schedules import density_at

Arrays = dict[str, np.ndarray]


def exchange(
    method: Compressor, shapes: Mapping[str, tuple[int, ...]], ranks: int, momentum: float
) -> Exchange:
    """Return the exchange of a method, in one pass for all ranks where there is one for it."""
    options = getattr(method, "density", None), getattr(method, "masking", True)
    plain = {DGC: lambda: DGC(*options[:1], masking=options[1]), TopK: lambda: TopK(*options[:1])}
    is_plain = type(method) in plain and plain[type(method)]() == method
    kind = AtOnce if is_plain or method == NoCompression() else Exchange
    return kind(method, shapes, ranks, momentum)


class Exchange:
    """What arrives of the ranks' gradients, and the momentum that is applied there or afterwards.

    Args:
        shapes: of the tensors by name.
        momentum: Nesterov's, of the method or of the optimizer.
    """

    def __init__(
        self,
        method: Compressor,
        shapes: Mapping[str, tuple[int, ...]],
        ranks: int,
        momentum: float,
    ) -> None:
        self.method, self.ranks, self.momentum = method, ranks, momentum
        self.shapes = dict(shapes)
        self.inside = method.takes_momentum
        self.sparse = self.of_sparse()
        #: the gradients, each of shape (ranks, ...), to be written before each step
        self.gradients = {n: np.zeros((ranks, *s), np.float32) for n, s in shapes.items()}
        self.directions = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
        self.velocities = {n: np.zeros(s, np.float32) for n, s in shapes.items()}
        self.world = World(method, ranks, fused=True)

    def of_sparse(self) -> list[str]:
        """Return the tensors that are sent in part."""
        return []

    def __call__(self, epoch: float, step: int) -> Arrays:
        """Return what to subtract from the weights, times the learning rate; the next call
        overwrites it."""
        self.exchange(epoch, step)
        for name, d in self.directions.items():
            if self.momentum and not self.has_momentum(name):
                u = self.velocities[name]
                u += d
                u *= np.float32(self.momentum)
                d += u
        return self.directions

    def has_momentum(self, name: str) -> bool:
        """Return whether that is in the direction already."""
        return self.inside

    def exchange(self, epoch: float, step: int) -> None:
        """Write the directions."""
        for name, outcome in self.through(self.world, epoch)[0].items():
            self.directions[name][...] = outcome.direction

    def through(self, world: World, epoch: float) -> list[dict[str, Outcome]]:
        world.epoch = epoch
        inside = self.momentum if self.inside else 0.0
        own = [{n: x[rank] for n, x in self.gradients.items()} for rank in range(self.ranks)]
        return world.exchange_all(own, momentum=inside, nesterov=inside > 0)

    def sent(self, epoch: float, step: int) -> int:
        """Return the bytes that rank 0 has sent in this step."""
        before, self.known = getattr(self, "known", 0), self.world.record.bytes_sent
        return self.known - before


class AtOnce(Exchange):
    """The same of ``DGC`` and ``TopK`` with options for density and masking alone, and of none."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.sizes = [math.prod(self.shapes[name]) for name in self.sparse]
        self.counts: list[int] = []
        self.bytes: dict[tuple[int, ...], int] = {}
        if self.sparse:
            given, v = self._column(self.gradients), self._column(self._zeros())
            u = self._column(self._zeros()) if self.inside else None
            self.steps = Steps(given, v, v, u, u)
            self.means = Column([self.directions[name].reshape(-1) for name in self.sparse])

    def of_sparse(self) -> list[str]:
        if isinstance(self.method, DGC):
            return [name for name, shape in self.shapes.items() if self.method.compresses(shape)]
        return list(self.shapes) if isinstance(self.method, TopK) else []

    def has_momentum(self, name: str) -> bool:
        return self.inside and name in self.sparse

    def _zeros(self) -> Arrays:
        return {n: np.zeros((self.ranks, *self.shapes[n]), np.float32) for n in self.sparse}

    def _column(self, arrays: Arrays) -> Column:
        """Rank by rank."""
        return Column([arrays[n][r].reshape(-1) for r in range(self.ranks) for n in self.sparse])

    def exchange(self, epoch: float, step: int) -> None:
        for name, x in self.gradients.items():
            if name not in self.sparse:
                np.mean(x, axis=0, out=self.directions[name])
        if not self.sparse:
            return
        density = density_at(self.method.density, step, epoch)
        counts = [max(math.ceil(density * n), 1) for n in self.sizes]
        if counts != self.counts:
            self.counts = counts
            self.selection = Selection(self.sizes * self.ranks, counts * self.ranks)
        momentum = self.momentum if self.inside else None
        indices, values, finite = self.selection.select(self.steps, momentum, nesterov=True)
        masking = self.inside and self.method.masking
        self.selection.settle(self.steps, indices, np.zeros_like(values), masking, finite)
        own = indices.reshape(self.ranks, -1)
        own = own - sum(self.sizes) * np.arange(self.ranks)[:, None]
        add_up(self.means, [*own], [*values.reshape(self.ranks, -1)], self.ranks)

    def sent(self, epoch: float, step: int) -> int:
        key = tuple(self.counts)
        if key not in self.bytes:  # indices are packed: steps differ by a few bytes
            world = World(self.method, self.ranks, fused=True)
            world.steps = dict.fromkeys(self.shapes, step)
            self.through(world, epoch)
            self.bytes[key] = world.record.bytes_sent
        return self.bytes[key]


class Network:
    """Linear layers with rectifiers between them, and cross-entropy.

    Args:
        widths: of the input, the layers and the classes; weights are drawn as PyTorch draws them.
    """

    def __init__(self, widths: tuple[int, ...], random: np.random.Generator) -> None:
        self.weights: Arrays = {}
        self.layers = len(widths) - 1
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            bound = inputs**-0.5
            weight = random.uniform(-bound, bound, (outputs, inputs))
            self.weights[f"weight{layer}"] = weight.astype(np.float32)
            bias = random.uniform(-bound, bound, outputs)
            self.weights[f"bias{layer}"] = bias.astype(np.float32)

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Return what goes into each layer, and the logits."""
        found = [x]
        for layer in range(self.layers):
            z = found[-1] @ self.weights[f"weight{layer}"].T
            z += self.weights[f"bias{layer}"]
            found.append(np.maximum(z, 0, out=z) if layer + 1 < self.layers else z)
        return found

    def differentiate(self, x: np.ndarray, y: np.ndarray, out: Arrays) -> None:
        """Write the gradients of each rank's mean loss to ``out``; x of shape (ranks, batch,
        inputs), y (ranks, batch)."""
        inputs = self.forward(x)
        d = inputs.pop()
        d -= d.max(-1, keepdims=True)
        np.exp(d, out=d)
        d /= d.sum(-1, keepdims=True)
        ranks, batch = y.shape
        d[np.arange(ranks)[:, None], np.arange(batch), y] -= 1
        d /= batch
        for layer in reversed(range(self.layers)):
            np.matmul(d.swapaxes(1, 2), inputs[layer], out=out[f"weight{layer}"])
            np.sum(d, axis=1, out=out[f"bias{layer}"])
            if layer:
                d = d @ self.weights[f"weight{layer}"]
                d *= inputs[layer] > 0

    def step(self, directions: Arrays, lr: float) -> None:
        for name, w in self.weights.items():
            w -= np.float32(lr) * directions[name]

    def test(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """Return the accuracy in per cent, and the loss."""
        z = self.forward(x)[-1]
        z -= z.max(-1, keepdims=True)
        losses = np.log(np.exp(z).sum(-1)) - z[np.arange(len(y)), y]
        return 100 * float((z.argmax(-1) == y).mean()), float(losses.mean())
