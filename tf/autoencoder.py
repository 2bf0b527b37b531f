"""The autoencoder of LGC in TensorFlow, in graphs as well; see
:class:`hvd_compress.autoencoder.Network`."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from hvd_compress.autoencoder import DECODER, ENCODER, SLOPE, stretched, unpacked
from hvd_compress.autoencoder.layout import Weights

Tensor: TypeAlias = tf.Tensor
Parameters = list[tuple[Tensor, Tensor]]


def encode(weights: Tensor, values: Tensor) -> Tensor:
    return _encoded(_unpacked(weights, innovation=False).encoder, values)


def gradient(
    weights: Tensor, values: Tensor, innovations: Tensor | None, leader: Any
) -> tuple[Tensor, Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(weights)
        encoder, decoders = _unpacked(weights, innovations is not None)
        ranks, n = values.shape
        latents = _encoded(encoder, values)
        if innovations is None:
            decoded = _decoded(decoders, tf.reduce_mean(latents, 0, keepdims=True), n, None)
            loss = tf.reduce_mean(tf.square(decoded - tf.reduce_mean(values, 0)))
        else:
            same = tf.repeat(tf.gather(latents, [leader]), ranks, axis=0)
            decoded = _decoded(decoders, same, n, innovations)
            apart = tf.square(latents[:, None] - latents[None])
            near = tf.reduce_sum(tf.reduce_mean(tf.square(decoded - values), 1))
            loss = (near + tf.reduce_sum(tf.reduce_mean(apart, 2))) / 2
    found = tape.gradient(loss, weights, unconnected_gradients="zero")
    return tf.convert_to_tensor(found), decoded


def _unpacked(weights: Tensor, innovation: bool) -> Weights:
    return unpacked(weights, weights.shape[0], innovation, tf.reshape)


def _encoded(parameters: Parameters, values: Tensor) -> Tensor:
    x = values[:, :, None]
    for layer, (kernel, bias) in zip(ENCODER, parameters, strict=True):
        x = tf.nn.leaky_relu(tf.nn.conv1d(x, kernel, layer.stride, "VALID") + bias, SLOPE)
    return tf.reshape(x, [values.shape[0], -1])


def _decoded(
    decoders: list[Parameters],
    latents: Tensor,
    n: int,
    innovations: Tensor | None,
) -> Tensor:
    where = stretched(n)
    rows = []
    for row in range(latents.shape[0]):
        parameters = decoders[row % len(decoders)]
        x = tf.reshape(latents[row], [1, -1, DECODER[0].inputs])
        for layer, (kernel, bias) in zip(DECODER, parameters[:-1], strict=True):
            length = (x.shape[1] - 1) * layer.stride + layer.width
            x = tf.nn.conv1d_transpose(
                x,
                tf.transpose(kernel, [0, 2, 1]),
                [1, length, layer.outputs],
                layer.stride,
                "VALID",
            )
            x = tf.nn.leaky_relu(x + bias, SLOPE)
        x = tf.gather(x, where, axis=1)
        if innovations is not None:
            x = tf.concat([x, innovations[row][None, :, None]], 2)
        kernel, bias = parameters[-1]
        rows.append((x @ kernel[0] + bias)[:, :, 0])
    return tf.concat(rows, 0)
