"""The autoencoder of LGC in TensorFlow, in graphs as well; see
:mod:`hvd_compress.methods.lgc_numpy_network`."""

from __future__ import annotations

from typing import Any, TypeAlias

import tensorflow as tf

from hvd_compress.methods import lgc_network as network
from hvd_compress.methods.lgc_layout import SLOPE

Tensor: TypeAlias = tf.Tensor


def encode(weights: Tensor, values: Tensor) -> Tensor:
    return network.encoded(_LAYERS, weights, values)


def gradient(
    weights: Tensor, values: Tensor, innovations: Tensor | None, leader: Any
) -> tuple[Tensor, Tensor]:
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss, decoded = network.loss(_LAYERS, weights, values, innovations, leader)
    found = tape.gradient(loss, weights, unconnected_gradients="zero")
    return tf.convert_to_tensor(found), decoded


def _convolve(x: Tensor, kernel: Tensor, bias: Tensor, stride: int) -> Tensor:
    return tf.nn.leaky_relu(tf.nn.conv1d(x, kernel, stride, "VALID") + bias, SLOPE)


def _spread(x: Tensor, kernel: Tensor, bias: Tensor, stride: int) -> Tensor:
    width, _, outputs = kernel.shape
    shape = [1, (x.shape[1] - 1) * stride + width, outputs]
    y = tf.nn.conv1d_transpose(x, tf.transpose(kernel, [0, 2, 1]), shape, stride, "VALID")
    return tf.nn.leaky_relu(y + bias, SLOPE)


_LAYERS = network.Layers(
    _convolve, _spread, take=lambda x, places: tf.gather(x, places, axis=1), mean=tf.reduce_mean
)
