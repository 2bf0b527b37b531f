"""Optimizers in Keras: what is traced, saved, scaled, met by callbacks, kept local, and refused."""

from __future__ import annotations

import tempfile
import warnings
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
    train,
)
from tests.scenarios.driver_tensorflow import hvd, hvd_keras, model_of, policy
from tests.scenarios.keras_fit import LOSS, apply, data, fit, scaled_step, weights_of
from tests.scenarios.optimizers import LR, reference, run_of

FREEZE = 4
#: the variance learns in steps 1, 2 and 4; after the freeze 5, 6, 8, 12 and 16 synchronize
SCHEDULE = {
    "var_freeze_step": FREEZE,
    "var_update_scaler": 2,
    "local_step_scaler": 1,
    "local_step_clipper": 4,
}
#: options of optimizers, and of the compression that they make, if they do
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "OneBitAdam": ({"freeze_step": FREEZE}, {"min_size": 0}),
    "OneBitLAMB": (
        {"freeze_step": FREEZE, "weight_decay": 0.01, "factor_range": (0.25, 2.0)},
        {"min_size": 0},
    ),
    "LAMB": ({"weight_decay": 0.1}, None),
    "ZeroOneAdam": (SCHEDULE, {"min_size": 0}),
}


def _optimizer(name: str = "OneBitAdam", **options: Any) -> Any:
    own, compression = ROWS[name]
    optimizer = getattr(hvd_keras, name)(LR, **own | options)
    method = "topk:density=0.2" if compression is None else optimizer.compressor(**compression)
    return hvd_keras.DistributedOptimizer(optimizer, compression=method)


def _compiled(name: str) -> Any:
    model = model_of("mlp")
    model.compile(_optimizer(name), loss=LOSS)
    model.optimizer.build(model.trainable_variables)  # so that the graph is traced once
    return model


def _assert_same(one: Any, other: Any) -> None:
    """In weights, in what the optimizer keeps, and in what waits."""
    assert_close(weights_of(one), weights_of(other), 0, 0)
    pairs = zip(one.optimizer.variables, other.optimizer.variables, strict=True)
    assert all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)
    for binding in ("compression", "_sync"):  # 0/1 Adam alone has the second
        if hasattr(one.optimizer, binding):
            found, expected = (getattr(m.optimizer, binding).store.entries() for m in (one, other))
            assert found.keys() == expected.keys()
            for key, x in found.items():
                np.testing.assert_array_equal(x, expected[key], err_msg=key)


def models_are_saved_and_go_on() -> None:
    """On all ranks from what rank 0 saved; the laws have what each optimizer keeps."""
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0, name="folder"))
    rows = [("LAMB", 3, 0), ("ZeroOneAdam", 7, 3)]
    more = [("OneBitAdam", 7, FREEZE), ("OneBitLAMB", 7, FREEZE), ("OneBitAdam", 2, 2)]
    for name, steps, variance_steps in rows + more if everything else rows:
        model = _compiled(name)
        apply(model.optimizer, model, range(steps))
        method = model.optimizer.compression.method
        if name == "ZeroOneAdam":
            path = Path(tempfile.mkdtemp()) / "own.keras"
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.save(path)
            told = any("optimizer.synchronize_parameters()" in str(w.message) for w in caught)
            assert told or hvd.size() == 1
            assert hvd.size() == 1 or any(
                map(np.any, model.optimizer._sync.store.entries().values())
            )
            _assert_same(hvd_keras.load_model(path, compression=method), model)
            model.optimizer.synchronize_parameters()
        model.optimizer.compression.consolidate()
        if hvd.rank() == 0:
            model.save(folder / "model.keras")  # warnings are errors here
            whole = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            whole.write(str(folder / "checkpoint"))
        barrier()
        loaded = hvd_keras.load_model(folder / "model.keras", compression=method)
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        restored = _compiled(name)
        whole = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer)
        whole.restore(str(folder / "checkpoint")).expect_partial()
        for other in (loaded, restored):
            assert int(other.optimizer.compression.step) == steps
            assert int(getattr(other.optimizer, "_variance_steps", 0)) == variance_steps
            _assert_same(other, model)
        for m in (model, loaded, restored) if everything else (model, loaded):
            apply(m.optimizer, m, [steps])
            assert_same_everywhere(weights_of(m))
            assert_close(weights_of(m), weights_of(model), 0, 0)
        barrier()


def eager_steps_of_several_passes_follow_the_formulas() -> None:
    """Those of a graph do in the scenarios of all frameworks."""
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    run = run_of("0/1 Adam", setup=options, **SCHEDULE)
    run.graph = run._step
    train(run, range(9), passes=2)
    assert int(run.compression.step) == 9
    expected = reference("0/1 Adam", 9, passes=2, **SCHEDULE)
    assert_close(run.weights(), expected, rtol=1e-7, atol=1e-9)
    run.optimizer.synchronize_parameters()
    assert_same_everywhere(run.weights())


def half_precision_skips_what_is_spoilt() -> None:
    with policy("mixed_float16"):
        model = model_of("mlp", "mixed_float16")
        optimizer = _optimizer()
        optimizer.build(model.trainable_variables)
    step = scaled_step(model, optimizer)
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


class _SameEverywhere(keras.callbacks.Callback):
    """Behind the callback that makes it so."""

    checks = 0

    def on_test_begin(self, logs: Any = None) -> None:
        self.checks += 1
        assert_same_everywhere(weights_of(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.on_test_begin()


def the_callback_synchronizes_before_validation_and_after_epochs() -> None:
    check = _SameEverywhere()
    path = str(Path(tempfile.mkdtemp()) / "model.keras")
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.CompressionCallback(),
        check,
        keras.callbacks.ModelCheckpoint(path),  # warnings are errors here
    ]
    model = _compiled("ZeroOneAdam")
    model.run_eagerly = True
    fit(None, callbacks, model=model, steps=3, epochs=2, validates=True)
    assert check.checks == 4


def fit_trains_with_sam_a_warm_up_and_compression() -> None:
    class WithSAM(keras.Sequential):
        sam = hvd_keras.SAM(0.05)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            variables = self.trainable_variables
            loss, gradients = self.sam.gradient(
                lambda: self.compute_loss(x, y, self(x, training=True)), variables
            )
            self.optimizer.apply(gradients, variables)
            return {"loss": loss}

    rate = hvd_keras.ScaledWarmup(0.01, batch_size=64, reference_batch_size=16, steps=8)
    local = hvd_keras.LARS(rate, trust_coefficient=0.5)
    model = WithSAM(model_of("mlp").layers)
    model.compile(hvd_keras.DistributedOptimizer(local, compression="topk:density=0.2"), loss=LOSS)
    model.optimizer.build(model.trainable_variables)
    x, y = data(12)
    before = float(LOSS(y, model(x)))
    fit(None, model=model, steps=12, epochs=5)
    assert float(LOSS(y, model(x))) < 0.95 * before
    assert_same_everywhere(weights_of(model))


def local_variables_go_their_own_way_and_constraints_hold() -> None:
    """With a momentum of their own, the variance of the steps at which 0/1 Adam learns, and
    without synchronizations: as in an optimizer of their own."""
    for name, more in (("OneBitAdam", {"beta_1": 0.5}), ("ZeroOneAdam", {})):
        options = ROWS[name][0] | more | {"epsilon": 1e-30}
        shared, local, alone = (
            keras.Variable(np.zeros(40), dtype="float64", name=name)
            for name in ("shared", "local", "alone")
        )
        shared.constraint = keras.constraints.NonNeg()
        optimizer, plain = _optimizer(name, **options), getattr(hvd_keras, name)(LR, **options)
        optimizer.register_local_var(local)
        random = np.random.default_rng(hvd.rank())
        for _ in range(8):
            own = random.normal(size=40)
            optimizer.apply([tf.constant(own), tf.constant(own)], [shared, local])
            plain.apply([tf.constant(own / hvd.size())], [alone])
            assert (shared.numpy() >= 0).all()
        assert shared.numpy().any()
        assert_same_everywhere({"shared": shared.numpy()})
        np.testing.assert_allclose(local.numpy(), alone.numpy(), rtol=1e-9)


def what_cannot_work_is_refused() -> None:
    x = tf.Variable(np.ones(40, np.float32))
    # Clipped to a norm of 1, the signs of n weights would be 1 / sqrt(n).
    for option in ("clipnorm", "clipvalue", "global_clipnorm"):
        with raises(ConfigError, f"{option}=2.0", "no gradients: drop it"):
            _optimizer(**{option: 2.0}).build([x])
    with raises(ConfigError, "use_ema"):
        _optimizer("ZeroOneAdam", use_ema=True).build([x])
    for method in ("onebit_adam", "zero_one_adam"):
        with raises(ConfigError, f"{method} hands out momenta", "which Adam would take"):
            hvd_keras.DistributedOptimizer(keras.optimizers.Adam(), compression=method)
    for optimizer in (hvd_keras.OneBitAdam(freeze_step=3), hvd_keras.ZeroOneAdam()):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(x * x)
        tape = hvd.DistributedGradientTape(tape, compression=optimizer.compressor())
        with raises(ConfigError, "hands out momenta", "DistributedOptimizer"):
            tape.gradient(y, [x])
    adam = hvd_keras.ZeroOneAdam(**SCHEDULE)
    scaled = keras.optimizers.LossScaleOptimizer(adam)
    with raises(ConfigError, "loss scaling", "bfloat16"):
        hvd_keras.DistributedOptimizer(scaled, compression=adam.compressor())
    with raises(ConfigError, "sparse_as_dense=True"):
        train(run_of("0/1 Adam", setup={"kind": "words"}), [0])
