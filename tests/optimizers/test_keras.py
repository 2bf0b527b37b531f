"""LAMB beside that of Keras; what only Keras has."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow.keras as hvd


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_without_decay_lamb_is_that_of_keras(decay):
    ends = []
    for lamb in (hvd.LAMB, keras.optimizers.Lamb):
        random = np.random.default_rng(0)
        variables = [keras.Variable(random.standard_normal(shape)) for shape in ((5, 4), (4,))]
        optimizer = lamb(0.01, epsilon=1e-6, weight_decay=decay)
        for _ in range(4):
            found = [random.standard_normal(v.shape) for v in variables]
            optimizer.apply([tf.constant(g, tf.float32) for g in found], variables)
        ends.append(variables)
    same = [np.allclose(x, y, rtol=1e-4, atol=1e-5) for x, y in zip(*ends, strict=True)]
    assert all(same) if decay == 0 else not any(same)


@pytest.mark.parametrize("make", [hvd.LAMB, hvd.OneBitAdam])
def test_gradients_without_variables_are_those_of_all(make):
    gradients, variables = [tf.ones(2), tf.ones(3)], [keras.Variable([1.0] * n) for n in (2, 3)]
    with pytest.raises(ValueError, match="must already be built"):
        make(0.1).apply(gradients)
    optimizer = make(0.1)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="gradients"):
        optimizer.apply(gradients[:1])
    optimizer.apply(gradients)
    assert optimizer.iterations == 1
    assert all((v.numpy() != 1).all() for v in variables)


def test_options_of_ones_own_go_by_name():
    with pytest.raises(TypeError):
        hvd.OneBitAdam(1e-3, 0.9, 0.999, 1e-8, 2000)


def test_a_warm_up_survives_saving():
    rate = hvd.ScaledWarmup(
        keras.optimizers.schedules.CosineDecay(0.1, 100),
        batch_size=64,
        reference_batch_size=16,
        steps=10,
    )
    config = keras.saving.serialize_keras_object(rate)
    again = keras.saving.deserialize_keras_object(config)
    for step in (0, 5, 10, 80):
        assert float(again(step)) == float(rate(step))
