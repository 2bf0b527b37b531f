"""Trains a network on real scans with any method, all ranks in lockstep inside this process.

    python tests/lockstep_training.py                      # all methods with their defaults
    python tests/lockstep_training.py none signum --lr 0.0005 --seeds 3

The demo's data, batches, momentum, learning rate and schedule; a network of two hidden layers.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hvd_compress import Compressor, as_compressor
from hvd_compress.config import lookup
from hvd_compress.engines.lockstep import World
from hvd_compress.methods import method_names

RANKS, BATCH = 4, 16
MOMENTUM = 0.9
WARMUP = 4


def digits(seed: int) -> tuple[np.ndarray, ...]:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, stratify=y, random_state=seed)
    return (x - x.mean()) / x.std(), (x_test - x.mean()) / x.std(), y, y_test


def learning_rate(lr: float, epoch: float, epochs: int) -> float:
    """Up from a tenth during the warm-up, then down along a cosine."""
    if epoch < WARMUP:
        return lr * (0.1 + 0.9 * epoch / WARMUP)
    return lr * (1 + math.cos(math.pi * (epoch - WARMUP) / (epochs - WARMUP))) / 2


def methods_of_sgd() -> list[str]:
    """All but those that are a part of an optimizer of their own."""
    return [name for name in method_names() if lookup("method", name).partner is None]


def accuracy(
    method: Compressor,
    lr: float = 0.05,
    epochs: int = 20,
    width: int = 128,
    seed: int = 0,
    ranks: type[World] = World,
) -> float:
    """On the test images, after training with ``method``, by which momentum travels if it takes it
    over; ``ranks``: a world that looks at what is exchanged, for instance."""
    x, x_test, y, y_test = digits(seed)
    random = np.random.default_rng(seed)
    weights = {}
    for layer, (inputs, outputs) in enumerate([(64, width), (width, width), (width, 10)]):
        scale = np.float32(np.sqrt(2 / inputs))
        weights[f"weight{layer}"] = scale * random.standard_normal((inputs, outputs), np.float32)
        weights[f"bias{layer}"] = np.zeros(outputs, np.float32)
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}
    inside, beside = (MOMENTUM, 0.0) if method.takes_momentum else (0.0, MOMENTUM)
    world, batches = ranks(method, RANKS), len(x) // RANKS // BATCH
    for epoch in range(epochs):
        world.epoch = epoch
        order = np.random.default_rng([seed, epoch]).permutation(len(x))[: RANKS * BATCH * batches]
        for batch, at in enumerate(order.reshape(batches, RANKS, BATCH)):
            rate = np.float32(learning_rate(lr, epoch + batch / batches, epochs))
            for name, gradients in gradients_of(weights, x[at], y[at]).items():
                outcome = world.exchange(list(gradients), name, momentum=inside)[0]
                velocity[name] = beside * velocity[name] + outcome.direction
                weights[name] = weights[name] - rate * velocity[name]
    return float((forward(weights, x_test)[-1].argmax(-1) == y_test).mean())


def forward(weights: dict[str, np.ndarray], x: np.ndarray) -> list[np.ndarray]:
    layers = [x]
    for layer in range(3):
        z = layers[-1] @ weights[f"weight{layer}"] + weights[f"bias{layer}"]
        layers.append(np.maximum(z, 0) if layer < 2 else z)
    return layers


def gradients_of(
    weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray
) -> dict[str, np.ndarray]:
    """The gradients of the mean loss of every rank's batch; the first dimension is the rank."""
    layers, found = forward(weights, x), {}
    z = layers.pop()
    gradient = np.exp(z - z.max(-1, keepdims=True))
    gradient /= gradient.sum(-1, keepdims=True)
    gradient -= np.eye(10, dtype=np.float32)[y]
    gradient /= y.shape[-1]
    for layer in reversed(range(3)):
        found[f"weight{layer}"] = layers[layer].swapaxes(1, 2) @ gradient
        found[f"bias{layer}"] = gradient.sum(1)
        gradient = gradient @ weights[f"weight{layer}"].T * (layers[layer] > 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("methods", nargs="*", default=methods_of_sgd())
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=128, help="of the hidden layers")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    print("| method | test accuracy |\n|---|---|")
    for text in options.methods:
        rates = (options.lr, options.epochs, options.width)
        found = [accuracy(as_compressor(text), *rates, seed) for seed in range(options.seeds)]
        print(
            f"| `{text}` | {100 * np.mean(found):.1f} +- {100 * np.std(found):.1f} % |", flush=True
        )


if __name__ == "__main__":
    main()
