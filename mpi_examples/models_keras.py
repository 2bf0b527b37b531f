"""The networks of models.py in Keras; images have their channels last."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers

Shape = tuple[int, int, int]


def cnn(shape: Shape, classes: int) -> keras.Model:
    """Two convolutions and two linear layers; 1.08 million parameters on 8 x 8 digits."""
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(classes),
        ]
    )


def mlp(shape: Shape, classes: int) -> keras.Model:
    """Three linear layers of 1024; 1.13 million parameters on 8 x 8 digits."""
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(1024, activation="relu"),
            layers.Dense(classes),
        ]
    )


def _convolution(x: Any, outputs: int, size: int, stride: int) -> Any:
    x = layers.Conv2D(outputs, size, stride, padding="same", use_bias=False)(x)
    return layers.BatchNormalization()(x)


def resnet20(shape: Shape, classes: int) -> keras.Model:
    """The small ResNet of He et al. (2016) for CIFAR-10; 0.27 million parameters."""
    inputs = keras.Input(shape)
    x = layers.ReLU()(_convolution(inputs, 16, 3, 1))
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            first = stride if block == 0 else 1
            body = layers.ReLU()(_convolution(x, outputs, 3, first))
            body = _convolution(body, outputs, 3, 1)
            if first != 1:
                x = _convolution(x, outputs, 1, first)
            x = layers.ReLU()(x + body)
    return keras.Model(inputs, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


MODELS = {"cnn": cnn, "mlp": mlp, "resnet20": resnet20}
