"""Models that teach each other, in Keras 3, beside a reference in this process."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.systems.teachers import WeightDecay
from hvd_compress.systems.teachers import losses as in_numpy
from hvd_compress.wire.header import padded
from tests.scenarios import applies
from tests.scenarios.driver import raises
from tests.scenarios.driver_tensorflow import hvd_keras as hvd

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
STEPS, RATE = 6, 0.1


def _model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)]
    )


def _batch(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([rank, step])
    x = random.standard_normal((10, 6)).astype("float32")
    return x, (x[:, 0] > 0) + 2 * (x[:, 1] > 0)


def _train(model, codistillation, rank: int, steps=range(STEPS), graph: bool = True) -> None:
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(model.trainable_variables)  # so that the graph is traced once

    def step(x, y):
        with tf.GradientTape() as tape:
            z = model(x, training=True)
            loss = codistillation.loss(LOSS(y, z), z, x)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)

    run = tf.function(step) if graph else step
    for number in steps:
        run(*map(tf.constant, _batch(rank, number)))


def _reference(kind: str, due, rank_of, weight: float = 0.5) -> list[keras.Model]:
    """All ranks' models; ``due(step)``: teachers are taken anew.  With checkpoints, they stay."""
    models = [_model(seed) for seed in range(hvd.size())]
    optimizers = [keras.optimizers.SGD(RATE) for _ in models]
    teachers = []
    for step in range(STEPS):
        if due(step):
            teachers = [[v.numpy() for v in m.variables] for m in models]
        gradients = []
        for rank, model in enumerate(models):
            x, y = _batch(rank_of(rank), step)
            own = [v.numpy() for v in model.variables]
            outputs = []
            for weights in [w for r, w in enumerate(teachers) if r != rank]:
                model.set_weights(weights)
                outputs.append(model(x, training=False))
            model.set_weights(own)
            with tf.GradientTape() as tape:
                z = model(x, training=True)
                loss = LOSS(y, z)
                if outputs and kind == "mse":
                    loss += weight * tf.reduce_mean((z - sum(outputs) / len(outputs)) ** 2)
                elif outputs:
                    p = sum(map(tf.nn.softmax, outputs)) / len(outputs)
                    q = tf.nn.log_softmax(z)
                    loss += weight * tf.reduce_mean(tf.reduce_sum(p * (tf.math.log(p) - q), -1))
            gradients.append(tape.gradient(loss, [v.value for v in model.trainable_variables]))
        for model, optimizer, gradient in zip(models, optimizers, gradients, strict=True):
            optimizer.apply(gradient, model.trainable_variables)
    return models


def _assert_follows(model, expected) -> None:
    for v, w in zip(model.variables, expected.variables, strict=True):
        np.testing.assert_allclose(v.numpy(), w.numpy(), rtol=1e-4, atol=1e-5)


def predictions_follow_a_reference() -> None:
    expected = _reference("kl", lambda step: True, lambda rank: 0)[hvd.rank()]
    for graph in (False, True):
        model = _model(hvd.rank())
        codistillation = hvd.Codistillation(model, "predictions", weight=0.5)
        _train(model, codistillation, 0, graph=graph)
        _assert_follows(model, expected)
        assert codistillation.step == STEPS
        if hvd.size() > 1:
            # Behind the frame's header one of 22 bytes, and 8 for the length of the message.
            sent = STEPS * (hvd.size() - 1) * (padded(22 + 10 * 4 * 4) + 8)
            assert codistillation.stats().total.bytes_sent == sent


def checkpoints_follow_a_reference_under_fit() -> None:
    model = _model(hvd.rank())
    codistillation = hvd.Codistillation(model, every=3, burn_in=1, weight=0.5, loss="mse")
    codistillation.use_in_fit()
    model.compile(keras.optimizers.SGD(RATE), LOSS, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    x, y = (
        np.concatenate(parts)
        for parts in zip(*(_batch(hvd.rank(), s) for s in range(STEPS)), strict=True)
    )
    model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
    expected = _reference("mse", lambda step: step in (1, 4), lambda rank: rank)
    _assert_follows(model, expected[hvd.rank()])
    assert codistillation.exchanges == 2 * (hvd.size() > 1)
    model.evaluate(x, y, batch_size=10, verbose=0)
    assert codistillation.step == STEPS


def the_loss_is_the_tasks_until_the_first_teachers_come() -> None:
    model = _model(hvd.rank())
    codistillation = hvd.Codistillation(model, every=4, delay=2)
    for step in range(3):
        x, y = _batch(hvd.rank(), step)
        outputs = model(x)
        task = LOSS(y, outputs)
        loss = codistillation.loss(task, outputs, x)
        assert (float(loss) > float(task)) == (step == 2 and hvd.size() > 1)


def losses_are_those_in_numpy() -> None:
    from hvd_compress.tensorflow.keras.codistillation import LOSSES

    z, *teachers = np.random.default_rng(0).standard_normal((4, 6, 5))
    assert LOSSES.keys() == in_numpy.LOSSES.keys()
    for name, (view, distance) in in_numpy.LOSSES.items():
        expected = distance(z, in_numpy.target(view, teachers))
        ours = LOSSES[name]
        goal = in_numpy.target(ours.view, [tf.constant(t) for t in teachers])
        assert abs(float(ours.distance(tf.constant(z), goal)) - expected) < 1e-12, name


@applies(least=2)
def teachers_predict_in_inference_mode() -> None:
    """With their statistics of batch normalisation, and without dropout."""

    def make(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        stack = [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization()]
        model = keras.Sequential([*stack, layers.Dropout(0.5), layers.Dense(4)])
        for _ in range(3):
            model(_batch(0, 0)[0], training=True)
        return model

    models = [make(rank) for rank in range(hvd.size())]
    model, x = models[hvd.rank()], _batch(7, 0)[0]
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


@applies(least=2)
def a_rank_with_nan_is_no_teacher() -> None:
    model, (x, _) = _model(hvd.rank()), _batch(0, 0)
    if hvd.rank() == 0:
        model.variables[0].assign(np.full((6, 8), np.nan))
    for exchange in ("predictions", "checkpoints"):
        codistillation = hvd.Codistillation(model, exchange)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            z = model(x)
            loss = codistillation.loss(tf.reduce_mean(z), z, x)
        assert np.isfinite(loss) == (hvd.rank() != 0)
        if hvd.rank():
            assert any("rank 0 predicts in step 1" in str(w.message) for w in caught)


def a_run_goes_on_from_its_state() -> None:
    model = _model(hvd.rank())
    one = hvd.Codistillation(model, every=3, weight=0.5)
    _train(model, one, hvd.rank(), range(2))
    state, weights = one.state_dict(), model.get_weights()
    _train(model, one, hvd.rank(), range(2, STEPS))
    other = _model(9)
    two = hvd.Codistillation(other, every=3, weight=0.5)
    other.set_weights(weights)
    two.load_state_dict(state)
    _train(other, two, hvd.rank(), range(2, STEPS))
    for v, w in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(v.numpy(), w.numpy())
    with raises(ConfigError, "another model"):
        two.load_state_dict({**state, "state": {"0": {"w": tf.zeros(1)}}})


def ranks_and_options_that_do_not_fit() -> None:
    model, (x, _) = _model(0), _batch(hvd.rank(), 0)
    with raises(UnsupportedError, "weight_decay is for PyTorch"):
        hvd.Codistillation(_model(0), weight_decay=WeightDecay((0.1, 0.0), (5,)))
    with raises(ConfigError, "model must be a keras.Model"):
        hvd.Codistillation([1])
    with raises(ConfigError, r"codistillation.loss\(task, logits, x\)"):
        hvd.Codistillation(model).loss(tf.zeros([]), model(x))
    if hvd.size() > 1:
        with raises(MismatchError, "the inputs of this rank and of rank"):
            hvd.Codistillation(model, "predictions").loss(tf.zeros([]), model(x), x)
        with raises(MismatchError, "weight=1.0", "weight=2.0"):
            made = hvd.Codistillation(model, weight=1.0 + hvd.rank())
            made.loss(tf.zeros([]), model(x), x)


def probabilities_are_no_logits() -> None:
    for last in (keras.layers.Dense(4, activation="softmax"), keras.layers.Softmax()):
        model = keras.Sequential([keras.Input((4,)), last])
        with raises(ConfigError, "from_logits=True"):
            hvd.Codistillation(model).use_in_fit()
        hvd.Codistillation(model, loss="mse").use_in_fit()
