"""A small network in NumPy, with gradients by hand: what every framework must agree with.

Training of all ranks happens in this one process: exchanges in the lockstep world, or plain
momentum SGD on the average gradient.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hvd_compress.engines.lockstep import World
from hvd_compress.systems import Ranks

# Two layers, since graphs take long to trace, and both kernels large enough to be compressed.
WIDTHS = (40, 64, 16)
WORDS, LENGTH, DIMENSIONS = 30, 6, 8
LR = 0.0625  # the same number in every precision

Weights = dict[str, np.ndarray]


@dataclasses.dataclass
class Setup:
    """The training: the network, and the options of the inner optimizer, which is SGD
    unless it is another class of the framework's; ``sam`` are options of SAM, if it climbs;
    ``tape``: in TensorFlow a tape exchanges, and no optimizer."""

    kind: str = "mlp"
    dtype: str = "float32"
    lr: float = LR
    momentum: float = 0.9
    nesterov: bool = False
    optimizer: Any = None
    sam: dict[str, Any] | None = None
    tape: bool = False


def initial_weights(kind: str, dtype: str = "float32") -> Weights:
    """``kind`` "mlp": kernels (inputs, outputs) and biases; "words": an embedding and a kernel."""
    random = np.random.default_rng(0)
    weights = {}
    if kind == "words":
        weights["embedding"] = random.normal(size=(WORDS, DIMENSIONS))
        weights["kernel0"] = random.normal(size=(DIMENSIONS, WIDTHS[-1])) / DIMENSIONS**0.5
    else:
        for i, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS)):
            weights[f"kernel{i}"] = random.normal(size=(inputs, outputs)) / inputs**0.5
            weights[f"bias{i}"] = 0.1 * random.normal(size=outputs)
    return {name: w.astype(dtype) for name, w in weights.items()}


def batch(kind: str, rank: int, step: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and labels: of "mlp" 0..4.  Others for every rank and step."""
    random = np.random.default_rng(1000 * rank + step)
    if kind == "words":
        words = random.integers(0, WORDS // 2, size=(8, LENGTH))  # many of them twice, half never
        return words, words.sum(1) % WIDTHS[-1]
    x = random.normal(size=(8, WIDTHS[0])).astype(dtype)
    return x, (x[:, :5] + 0.5 * x[:, 5:10]).argmax(1)


def others_weights(rank: int) -> Weights:
    """Return weights of "mlp" in float64, other ones for every rank."""
    random = np.random.default_rng(rank)
    weights = initial_weights("mlp", "float64")
    return {name: w + 0.25 * random.normal(size=w.shape) for name, w in weights.items()}


def logits(weights: Weights, x: np.ndarray) -> list[np.ndarray]:
    """Return the inputs of the layers of "mlp", and last its logits."""
    layers = len(WIDTHS) - 1
    inputs = [x]
    for i in range(layers):
        z = inputs[-1] @ weights[f"kernel{i}"] + weights[f"bias{i}"]
        inputs.append(np.tanh(z) if i < layers - 1 else z)
    return inputs


def gradients(kind: str, weights: Weights, rank: int, step: int, pull: Any = None) -> Weights:
    """Return those of a batch's mean cross-entropy; ``pull(logits, inputs)`` adds to them."""
    dtype = next(iter(weights.values())).dtype.name
    x, labels = batch(kind, rank, step, dtype)
    if kind == "words":
        mean = weights["embedding"][x].mean(1)
        d = _softmax_minus_one_hot(mean @ weights["kernel0"], labels)
        found = {"embedding": np.zeros_like(weights["embedding"]), "kernel0": mean.T @ d}
        np.add.at(found["embedding"], x, (d @ weights["kernel0"].T / LENGTH)[:, None, :])
        return found
    inputs = logits(weights, x)
    d = _softmax_minus_one_hot(inputs[-1], labels)
    d = d if pull is None else d + pull(inputs[-1], x)
    found = {}
    for i in reversed(range(len(WIDTHS) - 1)):
        found |= {f"kernel{i}": inputs[i].T @ d, f"bias{i}": d.sum(0)}
        d = (d @ weights[f"kernel{i}"].T) * (1 - inputs[i] ** 2)
    return {name: found[name] for name in weights}


def loss(weights: Weights, rank: int, step: int) -> float:
    """Mean cross-entropy of "mlp" on a batch."""
    x, labels = batch("mlp", rank, step, next(iter(weights.values())).dtype.name)
    p = softmax(logits(weights, x)[-1])
    return -np.log(p[np.arange(len(labels)), labels]).mean()


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def _softmax_minus_one_hot(z: np.ndarray, labels: np.ndarray) -> np.ndarray:
    p = softmax(z)
    p[np.arange(len(labels)), labels] -= 1
    return p / z.dtype.type(len(labels))


def compressed(
    method: Any,
    steps: Iterable[int],
    ranks: int,
    *,
    kind: str = "mlp",
    dtype: str = "float32",
    momentum: float = 0.9,
    nesterov: bool = False,
    lr: float = LR,
) -> Weights:
    """Weights after ``w = w - lr * direction``, or momentum SGD on the averages for methods that
    leave momentum to the optimizer."""
    world = World(method, ranks)
    weights = initial_weights(kind, dtype)
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}
    own = 0.0 if method.takes_momentum else momentum
    for step in steps:
        found = [gradients(kind, weights, rank, step) for rank in range(ranks)]
        outcomes = world.exchange_all(found, momentum=momentum, nesterov=nesterov)[0]
        for name in weights:
            velocity[name] = own * velocity[name] + outcomes[name].direction
            weights[name] = weights[name] - weights[name].dtype.type(lr) * velocity[name]
    return weights


def trained(
    method: Any,
    rates: Iterable[float],
    ranks: int,
    names: Sequence[str],
    turned: Any,
    momentum: float,
) -> tuple[Any, list[Weights]]:
    """All ranks in float64 after steps of a training method with momentum SGD, one at each of these
    learning rates: the world, and each rank's weights by the framework's ``names``, in its layout,
    which is ``turned``."""
    world = Ranks(method, ranks)
    keys = list(initial_weights("mlp"))

    def shown(weights: Weights) -> Weights:
        return {name: turned(k, weights[k]).copy() for k, name in zip(keys, names, strict=True)}

    own = [shown(initial_weights("mlp", "float64")) for _ in range(ranks)]
    velocity = [{name: 0 * w for name, w in weights.items()} for weights in own]
    for step, rate in enumerate(rates):
        found, losses = [], []
        for rank, weights in enumerate(own):
            ours = {k: turned(k, weights[name]) for k, name in zip(keys, names, strict=True)}
            found.append(shown(gradients("mlp", ours, rank, step)))
            losses.append(loss(ours, rank, step))
        own = world.before_step(own, losses=losses, rates=dict.fromkeys(names, rate))
        for weights, v, g in zip(own, velocity, found, strict=True):
            for name in names:
                v[name] = momentum * v[name] + g[name]
                weights[name] = weights[name] - rate * v[name]
        own = world.after_step(own)
    return world, own


def dense(
    steps: Iterable[int],
    ranks: int | Sequence[int],
    *,
    kind: str = "mlp",
    dtype: str = "float32",
    momentum: float = 0.9,
    lr: float = LR,
    passes: int = 1,
) -> Weights:
    """Momentum SGD on the average over the ranks, those named or so many, of the sum over
    ``passes`` batches."""
    ranks = range(ranks) if isinstance(ranks, int) else ranks
    weights = initial_weights(kind, dtype)
    velocity = {name: np.zeros_like(w) for name, w in weights.items()}
    for step in steps:
        found = [
            gradients(kind, weights, rank, step * passes + part)
            for rank in ranks
            for part in range(passes)
        ]
        for name in weights:
            average = sum(g[name] for g in found) / len(ranks)
            velocity[name] = momentum * velocity[name] + average
            weights[name] = weights[name] - weights[name].dtype.type(lr) * velocity[name]
    return weights
