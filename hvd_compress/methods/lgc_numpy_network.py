"""The autoencoder in NumPy, derivatives by hand: the reference for the frameworks' networks.

These have the same functions of the flat ``weights``, :func:`encode` and :func:`gradient`.  Batches
of values are (batch, n), of latents (batch, ``latent_size(n)``), all in the dtype of the weights.
Decoding has to give the same bits on all ranks, so there is one for all, :func:`decode`.

Inside, arrays are (batch, length, channels).  A convolution and its transpose are each other's
derivative.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_compress.methods.lgc_layout import (
    DECODER,
    ENCODER,
    SLOPE,
    Layer,
    latent_size,
    stretched,
    unpacked,
)

Array = np.ndarray
Parameters = list[tuple[Array, Array]]
#: derivative by the output -> (derivative by the input, by kernel and bias)
Backward = Callable[[Array], tuple[Array, Array, Array]]


def encode(weights: Array, values: Array) -> Array:
    """Return the latents of a batch of values."""
    encoder = unpacked(weights, weights.size, False, np.reshape).encoder
    return _forward(values[:, :, None], ENCODER, encoder, _convolved)[0].reshape(len(values), -1)


def decode(
    weights: Array, latents: Array, n: int, innovations: Array | None, first: int = 0
) -> Array:
    """Row i by decoder ``first`` + i modulo their number; ``innovations``: (batch, n) or none."""
    decoders = unpacked(weights, weights.size, innovations is not None, np.reshape).decoders
    rows = []
    for row, latent in enumerate(latents):
        own = None if innovations is None else innovations[row : row + 1]
        rows.append(_decoded(decoders[(first + row) % len(decoders)], latent[None], n, own)[0])
    return np.concatenate(rows)


def gradient(
    weights: Array, values: Array, innovations: Array | None, leader: int
) -> tuple[Array, Array]:
    """Return ``(gradient, decoded)`` of the loss of one batch, a row per rank.

    Without innovations decoded is one row, from the mean of all latents, and the loss its mean
    squared distance from the mean of ``values``.

    With them all rows are decoded from the latent of row ``leader``.  The loss is half the sum of
    their mean squared distances from ``values``, and half that of the distances between latents.
    The latter are those of each two rows (i, j), (j, i).
    """
    encoder, decoders = unpacked(weights, weights.size, innovations is not None, np.reshape)
    ranks, n = values.shape
    latents, back = _forward(values[:, :, None], ENCODER, encoder, _convolved)
    latents = latents.reshape(ranks, -1)
    d_latents = np.zeros_like(latents)
    d_decoders = [[(np.zeros_like(w), np.zeros_like(b)) for w, b in one] for one in decoders]
    if innovations is None:
        decoded, back_to_mean = _decoded(decoders[0], latents.mean(0, keepdims=True), n, None)
        d_mean, d_decoders[0] = back_to_mean(2 / n * (decoded - values.mean(0)))
        d_latents += d_mean / ranks
    else:
        rows = []
        for rank in range(ranks):
            which = rank % len(decoders)
            row, back_to_leader = _decoded(
                decoders[which], latents[[leader]], n, innovations[[rank]]
            )
            d_leader, own = back_to_leader(0.5 * 2 / n * (row - values[rank]))
            d_latents[leader] += d_leader[0]
            d_decoders[which] = [
                (w + more_w, b + more_b)
                for (w, b), (more_w, more_b) in zip(d_decoders[which], own, strict=True)
            ]
            rows.append(row)
        decoded = np.concatenate(rows)
        # d/dz_i of 1/2 sum over (i, j) of mean (z_i - z_j)^2
        apart = ranks * latents - latents.sum(0)
        d_latents += 0.5 * 4 / latents.shape[1] * apart
    length = latent_size(n) // ENCODER[-1].outputs
    _, d_encoder = back(d_latents.reshape(ranks, length, -1))
    parts = [part for one in (d_encoder, *d_decoders) for pair in one for part in pair]
    return np.concatenate([part.reshape(-1) for part in parts]), decoded


def _decoded(
    parameters: Parameters, latent: Array, n: int, innovation: Array | None
) -> tuple[Array, Callable[[Array], tuple[Array, Parameters]]]:
    z = latent.reshape(1, -1, DECODER[0].inputs)
    hidden, back = _forward(z, DECODER, parameters[:-1], _spread)
    where = stretched(n)
    full = hidden[:, where]
    if innovation is not None:
        full = np.concatenate([full, innovation[:, :, None]], axis=2)
    weight, bias = parameters[-1]
    result = full @ weight[0] + bias

    def backward(d_result: Array) -> tuple[Array, Parameters]:
        d = d_result[:, :, None]
        last = _outer(full, d)[None], d.sum((0, 1))
        d_hidden = np.zeros_like(hidden)
        np.add.at(d_hidden[0], where, (d @ weight[0].T)[0, :, : hidden.shape[2]])
        d_z, first = back(d_hidden)
        return d_z.reshape(1, -1), [*first, last]

    return result[:, :, 0], backward


def _forward(
    x: Array,
    layers: tuple[Layer, ...],
    parameters: Parameters,
    apply: Callable[[Array, Array, Array, int], tuple[Array, Backward]],
) -> tuple[Array, Callable[[Array], tuple[Array, Parameters]]]:
    steps = []
    for layer, (weight, bias) in zip(layers, parameters, strict=True):
        x, back = apply(x, weight, bias, layer.stride)
        slope = np.where(x < 0, x.dtype.type(SLOPE), x.dtype.type(1))
        x = x * slope
        steps.append((slope, back))

    def backward(d: Array) -> tuple[Array, Parameters]:
        found: Parameters = []
        for slope, back in reversed(steps):
            d, d_weight, d_bias = back(d * slope)
            found.append((d_weight, d_bias))
        return d, found[::-1]

    return x, backward


def _convolved(x: Array, weight: Array, bias: Array, stride: int) -> tuple[Array, Backward]:
    y = _convolve(x, weight, stride) + bias

    def backward(d: Array) -> tuple[Array, Array, Array]:
        d_x = np.zeros_like(x)
        spread = _transposed(d, weight.swapaxes(1, 2), stride)
        d_x[:, : spread.shape[1]] = spread
        taps = [_outer(tap, d) for tap in _taps(x, len(weight), stride, d.shape[1])]
        return d_x, np.stack(taps), d.sum((0, 1))

    return y, backward


def _spread(x: Array, weight: Array, bias: Array, stride: int) -> tuple[Array, Backward]:
    y = _transposed(x, weight, stride) + bias

    def backward(d: Array) -> tuple[Array, Array, Array]:
        taps = [_outer(x, tap) for tap in _taps(d, len(weight), stride, x.shape[1])]
        return _convolve(d, weight.swapaxes(1, 2), stride), np.stack(taps), d.sum((0, 1))

    return y, backward


def _convolve(x: Array, weight: Array, stride: int) -> Array:
    length = (x.shape[1] - len(weight)) // stride + 1
    taps = _taps(x, len(weight), stride, length)
    return sum(tap @ kernel for tap, kernel in zip(taps, weight, strict=True))


def _transposed(x: Array, weight: Array, stride: int) -> Array:
    length = (x.shape[1] - 1) * stride + len(weight)
    y = np.zeros((x.shape[0], length, weight.shape[2]), x.dtype)
    for tap, kernel in zip(_taps(y, len(weight), stride, x.shape[1]), weight, strict=True):
        tap += x @ kernel
    return y


def _outer(x: Array, y: Array) -> Array:
    return np.tensordot(x, y, ((0, 1), (0, 1)))


def _taps(x: Array, width: int, stride: int, length: int) -> list[Array]:
    return [x[:, j : j + stride * (length - 1) + 1 : stride] for j in range(width)]
