"""A multilayer perceptron in NumPy alone, whose gradients travel while backward goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from hvd_compress import Compressor, mpi
from hvd_compress.stats import Stats

WIDTHS = (64, 1024, 1024, 10)
MOMENTUM = 0.9


class Trainer:
    def __init__(self, compression: Compressor, seed: int) -> None:
        random = np.random.default_rng(seed)  # the same weights on all ranks
        self.parameters: dict[str, np.ndarray] = {}
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS), start=1):
            scale = np.float32(np.sqrt(2 / inputs))
            weight = scale * random.standard_normal((inputs, outputs), dtype=np.float32)
            self.parameters[f"weight{layer}"] = weight
            self.parameters[f"bias{layer}"] = np.zeros(outputs, np.float32)
        # DGC corrects momentum, so it must know it, and what comes back contains it; other methods
        # return the average of the gradients, and momentum is ours.
        theirs, self.momentum = (MOMENTUM, 0.0) if compression.takes_momentum else (0.0, MOMENTUM)
        self.velocity = {name: np.zeros_like(p) for name, p in self.parameters.items()}
        # Gradients leave by the megabyte, or those of this small model would wait for all others.
        self.reducer = mpi.Reducer(compression, momentum=theirs, bucket_bytes=2**20)

    def set_epoch(self, epoch: int) -> None:
        self.reducer.set_epoch(epoch)

    def step(self, x: np.ndarray, y: np.ndarray, lr: float) -> float:
        activations = self.forward(x)
        loss, gradient = cross_entropy(activations[-1], y)
        for name, ready in self.backward(activations, gradient):
            self.reducer.start(name, ready)  # does not wait: the layer before is next
        for name, direction in self.reducer.finish().items():
            self.velocity[name] = self.momentum * self.velocity[name] + direction
            self.parameters[name] -= lr * self.velocity[name]
        return loss

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """The input of each layer, and the output of the last one."""
        activations = [x.reshape(len(x), -1)]
        layers = len(WIDTHS) - 1
        for layer in range(1, layers + 1):
            z = activations[-1] @ self.parameters[f"weight{layer}"]
            z += self.parameters[f"bias{layer}"]
            activations.append(np.maximum(z, 0) if layer < layers else z)
        return activations

    def backward(
        self, activations: list[np.ndarray], gradient: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Gradients by name, the last layer's first, each as soon as it is known."""
        for layer in range(len(WIDTHS) - 1, 0, -1):
            x = activations[layer - 1]
            yield f"bias{layer}", gradient.sum(axis=0)
            yield f"weight{layer}", x.T @ gradient
            gradient = gradient @ self.parameters[f"weight{layer}"].T * (x > 0)

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        return float((self.forward(x)[-1].argmax(1) == y).mean())

    def stats(self) -> Stats:
        return self.reducer.stats()

    def weights(self) -> list[np.ndarray]:
        return list(self.parameters.values())


def cross_entropy(z: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean loss of a batch, and its gradient by ``z``."""
    z = z - z.max(axis=1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    gradient = np.exp(log_p)
    gradient[rows, labels] -= 1
    return float(-log_p[rows, labels].mean()), gradient / len(labels)
