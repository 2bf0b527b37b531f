"""LAMB beside that of Keras; SAM, ASAM and warm-up in Keras."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress.tensorflow.keras as hvd
from hvd_compress import optimizers
from hvd_compress.errors import ConfigError


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


def test_lamb_by_hand_beside_that_of_keras():
    ends = []
    for optimizer in (
        hvd.LAMB(0.1, weight_decay=0.01),
        keras.optimizers.Lamb(0.1, weight_decay=0.01, epsilon=1e-6),
    ):
        w = keras.Variable([3.0, 4.0])
        optimizer.apply([tf.constant([0.6, 0.8])], [w])
        ends.append(np.array([3.0, 4.0]) - w.numpy())
    np.testing.assert_allclose(ends[0], [0.351841, 0.355257], atol=1e-5)
    # Decayed first, then a step of the norm of what is left.
    np.testing.assert_allclose(ends[1], [0.356200, 0.357200], atol=1e-5)


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


def test_scaled_warmup_is_goyals():
    steps = keras.optimizers.schedules.PiecewiseConstantDecay([30 * 156], [0.1, 0.01])
    rate = hvd.ScaledWarmup(steps, batch_size=8192, reference_batch_size=256, steps=780)
    for t in (0, 1, 390, 780):
        assert float(rate(t)) == pytest.approx(0.1 + 3.1 * t / 780, rel=1e-5)
    assert float(rate(4000)) == pytest.approx(3.2, rel=1e-5)
    assert float(rate(5000)) == pytest.approx(0.32, rel=1e-5)
    sizes = {"reference_batch_size": 4, "scaling": "sqrt"}
    assert float(hvd.ScaledWarmup(0.1, batch_size=16, steps=0, **sizes)(0)) == pytest.approx(0.2)
    assert float(hvd.ScaledWarmup(0.1, batch_size=1, steps=9, **sizes)(0)) == pytest.approx(0.05)


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("make", "eps"), [(hvd.SAM, (0.0485071, 0.0121268)), (hvd.ASAM, (0.489922, 0.122480))]
)
def test_sharpness_by_hand(make, eps, in_graph):
    w = keras.Variable([1.0, 1.0], name="kernel")
    unused = keras.Variable([1.0])
    sam = make()

    def step():
        loss = lambda: tf.reduce_sum(tf.constant([4.0, 1.0]) * tf.square(w.value)) / 2  # noqa: E731
        found, gradients = sam.gradient(loss, [w, unused])
        assert gradients[1] is None
        return found, gradients[0]

    found, gradient = (tf.function(step) if in_graph else step)()
    assert float(found) == 2.5
    np.testing.assert_allclose(gradient, [4 * (1 + eps[0]), 1 + eps[1]], atol=1e-5)
    assert w.numpy().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["sam", "asam"])
def test_a_networks_gradient_is_that_at_the_formulas_point(kind):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(3),
        ]
    )
    x, y = np.random.default_rng(0).standard_normal((16, 6), np.float32), np.arange(16) % 3
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables, statistics = model.trainable_variables, model.non_trainable_variables
    before = [v.numpy().copy() for v in variables]

    def loss():
        return loss_fn(y, model(x, training=True))

    sam = hvd.SAM(0.1) if kind == "sam" else hvd.ASAM(0.3)
    _, second = tf.function(lambda: sam.gradient(loss, variables, statistics))()
    seen = [v.numpy().copy() for v in statistics]
    for v, start in zip(variables, before, strict=True):
        assert np.array_equal(v.numpy(), start), "weights are what they were, bit for bit"

    start_of = [np.zeros(8), np.ones(8)]
    for v, value in zip(statistics, start_of, strict=True):
        v.assign(value)
    with tf.GradientTape() as tape:
        value = loss()
    first = [g.numpy() for g in tape.gradient(value, [v.value for v in variables])]
    for v, once in zip(statistics, seen, strict=True):
        np.testing.assert_allclose(v.numpy(), once, rtol=1e-6)
    formula = optimizers.SAM(0.1) if kind == "sam" else optimizers.ASAM(0.3)
    steps = formula.ascent(before, first, [v.name for v in variables])
    for v, start, eps in zip(variables, before, steps, strict=True):
        v.assign(start + eps)
    with tf.GradientTape() as tape:
        value = loss()
    expected = tape.gradient(value, [v.value for v in variables])
    for g, other in zip(second, expected, strict=True):
        np.testing.assert_allclose(g, other, rtol=1e-3, atol=1e-5)


def test_bad_options_are_errors():
    for make, options in (
        (hvd.SAM, {"rho": 0}),
        (hvd.ASAM, {"eta": -1.0}),
        (hvd.SAM, {"average": True}),
    ):
        with pytest.raises(ConfigError, match=next(iter(options))):
            make(**options)


def test_asam_leaves_shifts_of_normalisation_alone():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    formula = hvd.ASAM(eta=0.5).formula
    gamma, beta = (formula.stretch(v.value.value(), v.name) for v in (layer.gamma, layer.beta))
    np.testing.assert_array_equal(gamma, [1.5, 1.5, 1.5])
    assert beta is None


def test_float64_climbs_in_float64():
    w = keras.Variable([1.0, 3.0], dtype="float64")
    _, (gradient,) = hvd.SAM(0.3).gradient(lambda: tf.reduce_sum(tf.square(w.value)), [w])
    found = np.array([2.0, 6.0])
    expected = found + 2 * 0.3 * found / np.linalg.norm(found)
    np.testing.assert_allclose(gradient, expected, rtol=1e-14)


def test_a_loss_of_something_else_is_an_error():
    with pytest.raises(ConfigError, match="found no gradient"):
        hvd.SAM().gradient(lambda: tf.constant(1.0), [keras.Variable([1.0])])
