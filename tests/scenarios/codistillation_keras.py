"""Models that teach each other, in Keras 3: under ``fit``, and what is refused."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.systems.teachers import WeightDecay
from hvd_compress.wire.header import padded
from tests.scenarios import applies, oracle
from tests.scenarios.driver import assert_close, raises, student
from tests.scenarios.driver_tensorflow import hvd_keras as hvd
from tests.scenarios.driver_tensorflow import model_of
from tests.scenarios.keras_fit import data, fit, weights_of


def fit_takes_the_steps_of_a_loop() -> None:
    """Which an eager loop takes; steps of graphs follow a reference."""
    options = {"every": 3, "burn_in": 1, "weight": 0.5, "loss": "mse"}
    loop = student(oracle.others_weights(hvd.rank()), **options)
    loop.graph = loop._step
    for step in range(6):
        loop.step(hvd.rank(), step)
    model = model_of("mlp", "float64")
    model.set_weights(list(oracle.others_weights(hvd.rank()).values()))
    codistillation = hvd.Codistillation(model, **options)
    codistillation.use_in_fit()
    fit(keras.optimizers.SGD(oracle.LR), model=model, steps=6, jit_compile=False)
    assert_close(weights_of(model), loop.weights(), 1e-6, 1e-7)
    assert codistillation.exchanges == 2 * (hvd.size() > 1)
    model.evaluate(*data(6), batch_size=8, verbose=0)
    assert codistillation.step == 6


@applies(least=2)
def teachers_predict_in_inference_mode() -> None:
    """With their statistics of batch normalisation, and without dropout."""
    x = np.random.default_rng(7).standard_normal((10, 6)).astype("float32")

    def make(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        stack = [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization()]
        model = keras.Sequential([*stack, layers.Dropout(0.5), layers.Dense(4)])
        for _ in range(3):
            model(x, training=True)
        return model

    models = [make(rank) for rank in range(hvd.size())]
    model = models[hvd.rank()]
    before = [v.numpy() for v in model.variables]
    codistillation = hvd.Codistillation(model, loss="mse")
    loss = codistillation.loss(tf.zeros([]), tf.zeros((10, 4)), x)
    others = [m(x, training=False) for rank, m in enumerate(models) if rank != hvd.rank()]
    expected = tf.reduce_mean((sum(others) / len(others)) ** 2)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for v, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(v.numpy(), old)
    # What is frozen, statistics included, is sent once.
    sent = codistillation.stats().total.bytes_sent // (hvd.size() - 1)
    assert sent == padded(4 * (6 * 8 + 8 + 4 * 8 + 8 * 4 + 4))
    for layer in model.layers[:2]:
        layer.trainable = False
    codistillation = hvd.Codistillation(model, every=1)
    for _ in range(2):
        codistillation.loss(tf.zeros([]), tf.zeros((10, 4)), x)
    again = codistillation.stats().total.bytes_sent // (hvd.size() - 1) - sent
    assert again == padded(4 * (8 * 4 + 4))


def options_and_states_that_do_not_fit() -> None:
    model, x = model_of("mlp"), oracle.batch("mlp", 0, 0)[0]

    def softmaxed(last: Any) -> Any:
        return keras.Sequential([keras.Input((4,)), last])

    with raises(UnsupportedError, "weight_decay is for PyTorch"):
        hvd.Codistillation(model, weight_decay=WeightDecay((0.1, 0.0), (5,)))
    with raises(ConfigError, "model must be a keras.Model"):
        hvd.Codistillation([1])
    codistillation = hvd.Codistillation(model)
    with raises(ConfigError, r"codistillation.loss\(task, logits, x\)"):
        codistillation.loss(tf.zeros([]), model(x))
    state = {**codistillation.state_dict(), "state": {"0": {"w": tf.zeros(1)}}}
    with raises(ConfigError, "another model"):
        codistillation.load_state_dict(state)
    for last in (keras.layers.Dense(4, activation="softmax"), keras.layers.Softmax()):
        with raises(ConfigError, "from_logits=True"):
            hvd.Codistillation(softmaxed(last)).use_in_fit()
        hvd.Codistillation(softmaxed(last), loss="mse").use_in_fit()
