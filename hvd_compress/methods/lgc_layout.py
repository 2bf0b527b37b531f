"""Layers, lengths and weights of the autoencoder (Abrahamyan et al., TNNLS 2021).

The encoder is five convolutions over the selected values in the order of their indices, without
padding.  A leaky rectifier follows each.  The latent is a quarter as long.

The decoder is four transposed convolutions with a rectifier each.  Then come a stretch to the old
length (the nearest element), and a convolution of width 1 over their channels.  With ``innovation``
it has one channel more: the values that a rank sends for itself.

The weights of all layers are end to end: encoder, then one decoder after the other.  Each layer has
the kernel (width, inputs, outputs), then the bias.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = Any


class Layer(NamedTuple):
    inputs: int
    outputs: int
    width: int
    stride: int

    @property
    def kernel(self) -> tuple[int, int, int]:
        return self.width, self.inputs, self.outputs


ENCODER = (
    Layer(1, 64, 3, 2),
    Layer(64, 128, 3, 2),
    Layer(128, 256, 3, 2),
    Layer(256, 64, 3, 2),
    Layer(64, 4, 1, 1),
)
DECODER = (Layer(4, 32, 3, 2), Layer(32, 64, 3, 2), Layer(64, 128, 3, 2), Layer(128, 32, 3, 2))
#: of the leaky rectifiers, for negative numbers
SLOPE = 0.01
#: fewer values than this have no latent
LEAST = 31


def last_layer(innovation: bool) -> Layer:
    return Layer(DECODER[-1].outputs + innovation, 1, 1, 1)


def layers(decoders: int, innovation: bool) -> list[Layer]:
    """Return all layers, in the order of their weights."""
    return [*ENCODER, *decoders * (*DECODER, last_layer(innovation))]


def lengths(n: int) -> list[int]:
    """Return the lengths of what goes into each layer of the encoder, and of what comes out of it.

    >>> lengths(1024)
    [1024, 511, 255, 127, 63, 63]
    """
    found = [n]
    for layer in ENCODER:
        found.append((found[-1] - layer.width) // layer.stride + 1)
    return found


def latent_size(n: int) -> int:
    """Return the count of numbers in the latent of ``n`` values; ``n`` is ``LEAST`` or more."""
    return ENCODER[-1].outputs * lengths(n)[-1]


def weights_of(layers: Sequence[Layer]) -> int:
    """Return the number of weights of some layers.

    >>> weights_of(ENCODER)
    172996
    """
    return sum(math.prod(layer.kernel) + layer.outputs for layer in layers)


def stretched(n: int) -> np.ndarray:
    """Return the element of the last transposed convolution that stands at each of ``n`` places
    (int64, shape (n,))."""
    length = lengths(n)[-1]
    for layer in DECODER:
        length = (length - 1) * layer.stride + layer.width
    return np.arange(n) * length // n


@functools.cache
def first_weights(decoders: int, innovation: bool) -> np.ndarray:
    """Return the weights before training (float32, 1-D), uniform within 1 / sqrt(inputs * width)
    around zero; always the same, read-only."""
    random = np.random.default_rng(0)
    parts: list[np.ndarray] = []
    for layer in layers(decoders, innovation):
        bound = 1 / math.sqrt(layer.inputs * layer.width)
        size = math.prod(layer.kernel) + layer.outputs
        parts.append(random.uniform(-bound, bound, size).astype(np.float32))
    weights = np.concatenate(parts)
    weights.setflags(write=False)
    return weights


class AutoencoderWeights(NamedTuple):
    """(kernel, bias) of each layer."""

    encoder: list[tuple[Array, Array]]
    decoders: list[list[tuple[Array, Array]]]


def unpacked(
    weights: Array, size: int, innovation: bool, reshape: Callable[[Array, Any], Array]
) -> AutoencoderWeights:
    """Return views of the ``size`` numbers of ``weights``, by layer."""
    parts, at = [], 0
    one, encoder = weights_of(layers(1, innovation)[len(ENCODER) :]), weights_of(ENCODER)
    for layer in layers((size - encoder) // one, innovation):
        end = at + math.prod(layer.kernel)
        parts.append((reshape(weights[at:end], layer.kernel), weights[end : end + layer.outputs]))
        at = end + layer.outputs
    first, each = len(ENCODER), len(DECODER) + 1
    decoders = [parts[i : i + each] for i in range(first, len(parts), each)]
    return AutoencoderWeights(parts[:first], decoders)
