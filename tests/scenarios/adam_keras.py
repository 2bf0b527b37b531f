"""1-bit Adam in Keras: what is saved, scaled, kept local, and refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError
from tests.scenarios import oracle
from tests.scenarios.driver import assert_close, assert_same_everywhere, barrier, raises
from tests.scenarios.driver_tensorflow import hvd, hvd_keras, model_of

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FREEZE = 4


def _optimizer(**options):
    adam = hvd_keras.OneBitAdam(0.01, freeze_step=FREEZE, **options)
    return hvd_keras.DistributedOptimizer(adam, compression=adam.compressor(min_size=0))


def fit(model, steps) -> None:
    batches = [oracle.batch("mlp", hvd.rank(), step) for step in steps]
    x, y = (np.concatenate([batch[i] for batch in batches]) for i in (0, 1))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


def weights_of(model) -> dict[str, np.ndarray]:
    return dict(zip(oracle.initial_weights("mlp"), model.get_weights(), strict=True))


def models_are_saved_and_go_on() -> None:
    for steps in (2, 7):
        model = model_of("mlp")
        model.compile(_optimizer(), loss=LOSS)
        fit(model, range(steps))
        model.optimizer.compression.consolidate()
        folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0, name="folder"))
        if hvd.rank() == 0:
            model.save(folder / "model.keras")
        barrier()
        method = model.optimizer.compression.method
        loaded = hvd_keras.load_model(folder / "model.keras", compression=method)
        assert loaded.optimizer.freeze_step == FREEZE
        assert int(loaded.optimizer.compression.step) == steps
        assert int(loaded.optimizer._variance_steps) == min(steps, FREEZE)
        for m in (model, loaded):
            fit(m, range(steps, steps + 5))
            assert_same_everywhere(weights_of(m))
        assert_close(weights_of(loaded), weights_of(model), 1e-4, 1e-5)


def half_precision_skips_what_is_spoilt() -> None:
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = _half_model()
        optimizer = _optimizer()
        optimizer.build(model.trainable_variables)
    finally:
        keras.config.set_dtype_policy(policy)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(LOSS(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for number in range(9):
        x, y = oracle.batch("mlp", hvd.rank(), number)
        if number in (1, 5) and hvd.rank() == 0:
            x = np.full_like(x, np.inf)
        step(tf.constant(x), tf.constant(y))
    inner = optimizer.inner_optimizer
    assert int(optimizer.compression.step) == 9
    assert int(inner.iterations) == 7
    assert int(inner._variance_steps) == FREEZE - 1
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert_same_everywhere(weights_of(model))
    for m, state in zip(inner.slots["exp_avg"], optimizer.compression.states.values(), strict=True):
        close = {"rtol": 1e-3, "atol": 1e-6}
        np.testing.assert_allclose(np.ravel(m), state["average"].numpy(), **close)


def _half_model():
    layers = [keras.layers.Dense(width, activation="tanh") for width in oracle.WIDTHS[1:-1]]
    model = keras.Sequential(
        [keras.Input((oracle.WIDTHS[0],)), *layers, keras.layers.Dense(oracle.WIDTHS[-1])]
    )
    model.set_weights(list(oracle.initial_weights("mlp").values()))
    return model


def local_variables_have_a_momentum_of_their_own() -> None:
    """Their gradient comes as it is, before the freeze and after it."""
    variables = [tf.Variable(np.ones(40)), tf.Variable(np.ones(40))]
    optimizer = _optimizer(beta_1=0.5, bias_correction=False)
    optimizer.register_local_var(variables[1])
    gradients = [np.full(40, 1.0 + hvd.rank()) for _ in variables]
    for _ in range(8):
        optimizer.apply([tf.constant(g) for g in gradients], variables)
    mean = (1 + hvd.size()) / 2
    own = (1 + hvd.rank()) / hvd.size()
    for m, g in zip(optimizer.slots["exp_avg"], (mean, own), strict=True):
        np.testing.assert_allclose(np.asarray(m), g * (1 - 0.5**8), rtol=1e-6)


def other_optimizers_are_refused() -> None:
    for method in ("onebit_adam", "zero_one_adam"):
        with raises(ConfigError, "which Adam would take for gradients"):
            hvd_keras.DistributedOptimizer(keras.optimizers.Adam(), compression=method)


def bad_options_are_errors() -> None:
    for name, value in (
        ("freeze_step", 0),
        ("freeze_step", 2.0),
        ("beta_1", 1.0),
        ("beta_2", -0.1),
        ("epsilon", -1.0),
    ):
        with raises(ConfigError, name):
            hvd_keras.OneBitAdam(**{name: value})


def a_tape_is_no_place_for_it() -> None:
    adam = hvd_keras.OneBitAdam(freeze_step=3)
    x = tf.Variable(np.ones(4, np.float32))
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(x * x)
    tape = hvd.DistributedGradientTape(tape, compression=adam.compressor())
    with raises(ConfigError, "hands out momenta", "DistributedOptimizer"):
        tape.gradient(y, [x])
