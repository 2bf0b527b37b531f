"""The autoencoder: the network for arrays of a kind, and the network and its loss over the layers
of a framework that derives gradients itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hvd_compress.backends import backend_of
from hvd_compress.backends.base import library_of
from hvd_compress.methods.lgc_layout import DECODER, ENCODER, Array, stretched, unpacked

_MODULES = {
    "numpy": "hvd_compress.methods.lgc_numpy_network",
    "torch": "hvd_compress.torch.autoencoder",
    "tensorflow": "hvd_compress.tensorflow.autoencoder",
}


def network_of(x: Array) -> Any:
    """Return the network for arrays such as ``x``: NumPy's, or that of the framework that the array
    belongs to."""
    return importlib.import_module(_MODULES[library_of(type(x))])


class Layers(NamedTuple):
    """Functions of arrays (batch, length, channels).

    Attributes:
        convolve: of an array, a kernel (width, inputs, outputs), a bias and a stride, without
            padding, and a leaky rectifier after it.
        spread: the transpose of the convolution, and a rectifier.
        take: elements of the length, at places in NumPy.
        mean: over an axis, or ``None`` for all.
    """

    convolve: Callable[[Array, Array, Array, int], Array]
    spread: Callable[[Array, Array, Array, int], Array]
    take: Callable[[Array, Any], Array]
    mean: Callable[[Array, int | None], Array]


def encoded(nn: Layers, weights: Array, values: Array) -> Array:
    xp = backend_of(weights)
    parameters = unpacked(weights, xp.size(weights), False, xp.reshape).encoder
    return _encoded(nn, parameters, values)


def loss(
    nn: Layers, weights: Array, values: Array, innovations: Array | None, leader: Any
) -> tuple[Array, Array]:
    """Return ``(loss, decoded)``; see
    :func:`hvd_compress.methods.lgc_numpy_network.gradient`."""
    xp = backend_of(weights)
    encoder, decoders = unpacked(weights, xp.size(weights), innovations is not None, xp.reshape)
    ranks, n = xp.shape(values)
    latents = _encoded(nn, encoder, values)
    if innovations is None:
        decoded = _decoded(nn, decoders[0], nn.mean(latents, 0), n, None)
        return nn.mean((decoded - nn.mean(values, 0)) ** 2, None), decoded
    own = xp.take(latents, [leader])
    rows = [
        _decoded(nn, decoders[rank % len(decoders)], own, n, innovations[rank])
        for rank in range(ranks)
    ]
    decoded, apart = xp.concat(rows), latents[:, None] - latents[None]
    # Sums over the ranks, and over each two of them, of means.
    near = ranks * nn.mean((decoded - values) ** 2, None)
    return (near + ranks**2 * nn.mean(apart**2, None)) / 2, decoded


def _encoded(nn: Layers, parameters: Sequence[tuple[Array, Array]], values: Array) -> Array:
    x = values[:, :, None]
    for layer, (kernel, bias) in zip(ENCODER, parameters, strict=True):
        x = nn.convolve(x, kernel, bias, layer.stride)
    xp = backend_of(x)
    return xp.reshape(x, (xp.shape(values)[0], -1))


def _decoded(
    nn: Layers,
    parameters: Sequence[tuple[Array, Array]],
    latent: Array,
    n: int,
    innovation: Array | None,
) -> Array:
    """Return one row of ``n`` values."""
    xp = backend_of(latent)
    x = xp.reshape(latent, (1, -1, DECODER[0].inputs))
    for layer, (kernel, bias) in zip(DECODER, parameters[:-1], strict=True):
        x = nn.spread(x, kernel, bias, layer.stride)
    x = nn.take(x, stretched(n))
    if innovation is not None:
        x = xp.concat([x, innovation[None, :, None]], 2)
    kernel, bias = parameters[-1]
    return (xp.matmul(x, kernel) + bias)[:, :, 0]
