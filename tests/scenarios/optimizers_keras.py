"""Optimizers in Keras: what is saved, scaled, kept local, and refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError
from tests.scenarios import oracle
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    barrier,
    everything,
    raises,
)
from tests.scenarios.driver_tensorflow import hvd, hvd_keras, model_of

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FREEZE = 4
#: options of optimizers, and of the compression that they make, if they do
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "OneBitAdam": ({"freeze_step": FREEZE}, {"min_size": 0}),
    "OneBitLAMB": (
        {"freeze_step": FREEZE, "weight_decay": 0.01, "factor_range": (0.25, 2.0)},
        {"min_size": 0},
    ),
    "LAMB": ({"weight_decay": 0.1}, None),
}


def _optimizer(name: str = "OneBitAdam", rate: float = 0.01, **options: Any):
    own, compression = ROWS[name]
    optimizer = getattr(hvd_keras, name)(rate, **own | options)
    method = "topk:density=0.2" if compression is None else optimizer.compressor(**compression)
    return hvd_keras.DistributedOptimizer(optimizer, compression=method)


def fit(model, steps) -> None:
    batches = [oracle.batch("mlp", hvd.rank(), step) for step in steps]
    x, y = (np.concatenate([batch[i] for batch in batches]) for i in (0, 1))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


def weights_of(model) -> dict[str, np.ndarray]:
    return dict(zip(oracle.initial_weights("mlp"), model.get_weights(), strict=True))


def models_are_saved_and_go_on() -> None:
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0, name="folder"))
    for name in ROWS:
        model, reached = model_of("mlp"), 0
        model.compile(_optimizer(name), loss=LOSS)
        model.optimizer.build(model.trainable_variables)  # so that the graph is traced once
        # Before the freeze, where there is one, and after it; the laws have that of 1-bit LAMB.
        early = name == "OneBitAdam" or (name == "OneBitLAMB" and everything)
        for steps in (2, 7) if early else (7,):
            fit(model, range(reached, steps))
            reached = _saved_and_goes_on(name, model, steps, folder)


def _saved_and_goes_on(name: str, model, steps: int, folder: Path) -> int:
    """A model after so many steps, and one that is loaded; returns the steps of both at the end."""
    model.optimizer.compression.consolidate()
    if hvd.rank() == 0:
        model.save(folder / "model.keras")
    barrier()
    method = model.optimizer.compression.method
    loaded = hvd_keras.load_model(folder / "model.keras", compression=method)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert int(loaded.optimizer.compression.step) == steps
    if "freeze_step" in ROWS[name][0]:
        assert int(loaded.optimizer._variance_steps) == min(steps, FREEZE)
    for kind, ours in model.optimizer.slots.items():
        theirs = loaded.optimizer.slots[kind]
        assert all(map(np.array_equal, map(np.asarray, ours), map(np.asarray, theirs)))
        assert all(np.any(np.asarray(x)) for x in theirs)
    for m in (model, loaded):
        fit(m, range(steps, steps + 4))
        assert_same_everywhere(weights_of(m))
    assert_close(weights_of(loaded), weights_of(model), 1e-4, 1e-5)
    return steps + 4


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
    states = optimizer.compression.store.states.values()
    for m, state in zip(inner.slots["exp_avg"], states, strict=True):
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


def decay_takes_no_part_in_momentum() -> None:
    """Without a gradient weights fade, and do nothing else."""
    # Of 1-bit LAMB u = 0.5 p, and the coefficient is |p| / |u| = 2.
    kernel, bias = (tf.Variable(tf.ones([4]), name=name) for name in ("kernel", "bias"))
    lamb = hvd_keras.OneBitLAMB(0.25, weight_decay=0.5)
    lamb.exclude_from_weight_decay(var_names=["bias"])
    lamb.apply([tf.zeros([4])] * 2, [kernel, bias])
    np.testing.assert_allclose(kernel.numpy(), np.full(4, 0.75), rtol=1e-6)
    np.testing.assert_array_equal(bias.numpy(), np.ones(4))


def what_would_change_signs_is_refused() -> None:
    """Clipped to a norm of 1, the signs of n weights would be 1 / sqrt(n)."""
    x = tf.Variable(np.ones(40, np.float32))
    for option in ("clipnorm", "clipvalue", "global_clipnorm"):
        with raises(ConfigError, f"{option}=2.0", "no gradients: drop it"):
            _optimizer(**{option: 2.0}).build([x])


def others_are_refused() -> None:
    for method in ("onebit_adam", "zero_one_adam"):
        with raises(ConfigError, f"{method} hands out momenta", "which Adam would take"):
            hvd_keras.DistributedOptimizer(keras.optimizers.Adam(), compression=method)
    x = tf.Variable(np.ones(4, np.float32))
    for optimizer in (hvd_keras.OneBitAdam(freeze_step=3), hvd_keras.ZeroOneAdam()):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(x * x)
        tape = hvd.DistributedGradientTape(tape, compression=optimizer.compressor())
        with raises(ConfigError, "hands out momenta", "DistributedOptimizer"):
            tape.gradient(y, [x])
