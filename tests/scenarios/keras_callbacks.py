"""Callbacks, elastic states and the environment in Keras, by Horovod's import lines and ours."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_compress import FP16, TopK
from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.integrations.environment import compared
from tests.scenarios import applies, horovod_only, oracle
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    barrier,
    make,
    raises,
    train,
)
from tests.scenarios.driver_tensorflow import hvd, hvd_keras, library, model_of
from tests.scenarios.environment import assert_said, environment
from tests.scenarios.keras_fit import DENSE, LOSS, SPARSE, fit, sgd, weights_of


def _horovods(name: str) -> Any:
    return importlib.import_module(name)


class _Watch(keras.callbacks.Callback):
    """The rate and the weights after each batch, and the weights after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.weights: list[dict[str, np.ndarray]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(np.asarray(self.model.optimizer.learning_rate)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.weights.append(weights_of(self.model))


def broadcasts_averages_and_schedules() -> None:
    """Which are the same in all modules that users take them from."""
    own, device = hvd_keras.callbacks, {}
    if library != "mpi":
        own, device = _horovods("horovod.keras").callbacks, {"device": "/cpu:0"}
    watch = _Watch()
    callbacks = [
        own.BroadcastGlobalVariablesCallback(0),
        own.MetricAverageCallback(**device),
        own.LearningRateWarmupCallback(oracle.LR, warmup_epochs=1, verbose=1),
        own.LearningRateScheduleCallback(oracle.LR, 0.5, start_epoch=1),
    ]
    modules = () if library == "mpi" else ("horovod.tensorflow.keras", "horovod.keras")
    for module in (hvd_keras, *map(_horovods, modules)):
        for callback in callbacks:
            assert getattr(module.callbacks, type(callback).__name__) is type(callback)
    model = model_of("mlp")
    if hvd.rank() > 0:
        model.set_weights([w + 1 for w in model.get_weights()])
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    model, history = fit(
        optimizer, [*callbacks, watch], model=model, epochs=3, metrics=["accuracy"]
    )
    assert_same_everywhere(weights_of(model))
    assert_same_everywhere({k: np.array(history[k]) for k in ("loss", "accuracy")})
    np.testing.assert_allclose(history["lr"], oracle.LR * np.array([1, 1, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(watch.rates[8:], oracle.LR * np.repeat([1, 0.5], 8), rtol=1e-6)


def a_number_multiplies_the_rate_every_epoch() -> None:
    watch = _Watch()
    schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.5, staircase=False)
    fit(sgd(), [schedule, watch], steps=4, epochs=2, run_eagerly=True)
    np.testing.assert_allclose(watch.rates, 0.1 * 0.5 ** (np.arange(8) / 4), rtol=1e-6)
    with raises(ConfigError, "initial_lr"):
        hvd_keras.callbacks.LearningRateScheduleCallback(None, 0.5)


@applies(least=2)
def what_is_built_on_one_rank_is_sent_to_all() -> None:
    """As a checkpoint is that was loaded there alone.  A model that has no variables elsewhere is
    an error on all ranks."""
    send, first = hvd_keras.callbacks.BroadcastGlobalVariablesCallback, hvd.rank() == 0
    for optimizer in (
        hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE),
        keras.optimizers.Adam(0.0),
    ):
        model = model_of("mlp")
        model.compile(optimizer, loss=LOSS)
        if first:
            optimizer.build(model.trainable_variables)
            optimizer.iterations.assign(5)
        fit(None, [send(0)], model=model, steps=1, built=False)
        assert int(optimizer.iterations) == 6
    model = keras.Sequential([keras.layers.Dense(10)])
    if first:
        model.build((None, oracle.WIDTHS[0]))
    with raises(MismatchError, "rank 0: 6 variables", "rank 1.*: 2", "keras.Input"):
        fit(keras.optimizers.SGD(0.1, momentum=0.9), [send(0)], model=model, steps=1, built=False)


@applies(least=2)
def callbacks_tell_of_a_rank_with_fewer_batches() -> None:
    """It is at the end of its epoch, and the others are in a step."""
    errors, own = (tf.errors.OpError, MismatchError), hvd_keras.callbacks
    for options, callback, call in (
        ({"compression": SPARSE}, own.CompressionCallback(), "average of 4 arrays"),
        ({"compression": SPARSE}, own.MetricAverageCallback(), "MetricAverageCallback in epoch 0"),
        ({"method": hvd_keras.LocalSGD(sync_every=3)}, own.MetricAverageCallback(), "Metric"),
    ):
        optimizer = hvd_keras.DistributedOptimizer(sgd(), **options)
        with raises(errors, f"rank 0: {call}", ": a step", "fewer batches", "steps_per_epoch"):
            fit(optimizer, [callback], steps=3 if hvd.rank() else 2)
        barrier()


def velocities_follow_the_learning_rate() -> None:
    """Momentum correction: with the rate halved in mid-training, Keras's velocity, which has the
    rate in it, goes on as if it had been gathered with the new one."""

    class Halve(hvd_keras.callbacks.LearningRateScheduleCallback):
        pass

    for correct in (True, False):
        callback = Halve(
            oracle.LR,
            lambda e: 1.0 if e < 0.5 else 0.5,
            staircase=False,
            momentum_correction=correct,
        )
        model, _ = fit(sgd(), [callback], steps=4, run_eagerly=True)
        weights = oracle.initial_weights("mlp")
        velocity = {k: 0 * w for k, w in weights.items()}
        for step in range(4):
            lr = oracle.LR * (1.0 if step < 2 else 0.5)
            g = oracle.gradients("mlp", weights, hvd.rank(), step)
            for k in weights:
                velocity[k] = 0.9 * velocity[k] + g[k]
                weights[k] = weights[k] - np.float32(lr) * velocity[k]
        error = max(np.abs(w - weights[k]).max() for k, w in weights_of(model).items())
        assert (error < 1e-5) == correct


def some_variables_keep_what_their_rank_has() -> None:
    model = model_of("mlp")
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    kernel, bias, *_ = model.trainable_variables
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, "", [kernel])
    broadcast.register_local_var(bias)
    fit(keras.optimizers.SGD(0.0), [broadcast], model=model, steps=1, run_eagerly=True)
    initial = oracle.initial_weights("mlp")
    for name, weight in weights_of(model).items():
        offset = hvd.rank() if name in ("kernel0", "bias0") else 0
        np.testing.assert_allclose(weight, initial[name] + offset, rtol=1e-6)
    with raises(ConfigError, "local_variables"):
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])


@horovod_only
def the_best_model_is_kept() -> None:
    classes = (
        (_horovods("horovod.keras"), ("loss", 0, "min")),
        (_horovods("horovod.tensorflow.keras"), ("loss", 0, True, "min")),
        (hvd_keras, ("loss", 0, False, "min", "epoch")),
    )
    folder, watch = Path(tempfile.mkdtemp()), _Watch()
    checkpoints = []
    for i, (module, options) in enumerate(classes):
        checkpoints.append(module.callbacks.BestModelCheckpoint(*options))
        kind = ".weights.h5" if True in options else ".keras"
        checkpoints[i].filepath = str(folder / f"{i}{kind}")
    callbacks = [
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.CompressionCallback(),
        *checkpoints,
        watch,
        # What comes after the best epoch is worse.
        hvd_keras.callbacks.LearningRateScheduleCallback(oracle.LR, lambda e: 100.0 ** (e > 1)),
    ]
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    model, history = fit(optimizer, callbacks, steps=3, epochs=4, run_eagerly=True)
    number = int(np.argmin(history["loss"]))
    assert number < 3
    for best in checkpoints:
        model.set_weights([w + 1 for w in model.get_weights()])
        model.load_weights(best.filepath)
        assert_close(weights_of(model), watch.weights[number], 0, 0)
    with raises(ConfigError, "filepath="):
        fit(sgd(), [hvd_keras.callbacks.BestModelCheckpoint("loss")])
    assert hvd_keras.callbacks.BestModelCheckpoint(filepath="x.keras").filepath == "x.keras"


@horovod_only
def a_commit_is_what_restore_goes_back_to() -> None:
    callbacks_of = "CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"
    for name in ("KerasState", *callbacks_of):
        ours = getattr(hvd_keras.elastic, name)
        assert getattr(_horovods("horovod.tensorflow.keras").elastic, name) is ours
    for module in (hvd_keras, _horovods("horovod.keras")):
        optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
        model = model_of("mlp")
        model.compile(optimizer, loss=LOSS, run_eagerly=module is not hvd_keras)
        optimizer.build(model.trainable_variables)
        state = module.elastic.KerasState(model, batch=0, epoch=0)
        callbacks = [getattr(module.elastic, name)(state) for name in callbacks_of]
        fit(None, callbacks, model=model, steps=4)
        assert (state.epoch, state.batch) == (1, 0)
        state.commit()
        weights, waits = weights_of(model), optimizer.compression.values()
        runs = []
        for _ in range(2):
            fit(None, model=model, steps=4)
            runs.append(weights_of(model))
            state.epoch = 7
            state.restore()
            assert state.epoch == 1
            assert_close(weights_of(model), weights, 0, 0)
            for key, value in optimizer.compression.values().items():
                np.testing.assert_array_equal(value, waits[key])
        assert_close(runs[0], runs[1], 0, 0)


@horovod_only
def new_workers_take_over_state_and_a_share_of_what_waits() -> None:
    """The last rank comes new: it begins like the others, who keep among them what waited."""
    keras.utils.clear_session()  # the new one counts layers anew, and has the names of the others
    run = make(SPARSE)
    is_new = hvd.rank() == hvd.size() - 1 and hvd.size() > 1
    train(run, range(3))
    waited = run.compression.store.states["0"]["residual"].numpy()
    if is_new:
        keras.utils.clear_session()
        run, waited = make(SPARSE), np.zeros_like(waited)
    state = hvd.elastic.TensorFlowKerasState(run.model, run.optimizer, step=0 if is_new else 3)
    state.sync()
    assert state.step == 3
    assert int(run.compression.step) == 3
    total = hvd.allreduce(tf.constant(waited), op=hvd.Sum, name="waited").numpy()
    begun = max(hvd.size() - 1, 1)
    residual = run.compression.store.states["0"]["residual"].numpy()
    np.testing.assert_allclose(residual * begun, total, rtol=1e-4, atol=1e-6)
    assert np.abs(residual).sum() > 0
    assert_same_everywhere(run.weights() | run.states())
    state.on_reset()  # with as many ranks as before, graphs made anew do what the old ones did
    train(run, range(3, 6))
    assert_same_everywhere(run.weights())


@horovod_only
def states_that_cannot_be_kept_are_refused() -> None:
    adam = hvd_keras.ZeroOneAdam(1e-3)
    optimizer = hvd_keras.DistributedOptimizer(adam, compression=adam.compressor())
    with raises(UnsupportedError, "OneBitAdam"):
        hvd_keras.elastic.KerasState(model_of("mlp"), optimizer)
    with raises(ValueError, "not built"):
        hvd_keras.elastic.KerasState(keras.Sequential([keras.layers.Dense(3)]), sgd())


@horovod_only
def the_environment_names_a_method_for_scripts_that_say_none() -> None:
    none, fp16 = hvd.Compression.none, hvd.Compression.fp16
    horovod_keras, horovod_tf = _horovods("horovod.keras"), _horovods("horovod.tensorflow")
    with environment("topk:density=0.05") as lines:
        for module in (_horovods("horovod.tensorflow.keras"), horovod_keras, hvd_keras, hvd):
            for options in ({}, {"compression": none}):
                optimizer = module.DistributedOptimizer(sgd(), **options)
                assert optimizer.distribution.method == TopK(density=0.05)
            own = module.DistributedOptimizer(sgd(), compression=DENSE)
            assert own.distribution.method == DENSE
        fit(optimizer, steps=2, run_eagerly=True)
        assert optimizer.compression.stats().total.ratio > 5
        own = hvd_keras.DistributedOptimizer(sgd(), compression=fp16)
        assert own.distribution.method == FP16()
        variable = tf.Variable(tf.ones([40, 40]))
        for module in (hvd, horovod_tf):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(variable**2)
            tape = module.DistributedGradientTape(tape, compression=none)
            tape.gradient(y, [variable])
            assert tape.compression.method == TopK(density=0.05)
        path = Path(tempfile.mkdtemp()) / "model.keras"
        plain = model_of("mlp")
        plain.compile(sgd(), loss=LOSS)
        plain.optimizer.build(plain.trainable_variables)
        plain.save(path)
        for load in (hvd_keras.load_model, horovod_keras.load_model):
            loaded = load(path, None, None, none)
            assert loaded.optimizer.distribution.method == TopK(density=0.05)
    variable = "HVD_COMPRESSION=topk:density=0.05"
    passed_over = f"{variable} is not used, since the script names compression="
    assert_said(
        lines,
        hvd.rank(),
        f"{variable} names the compression, since the script names none: TopK(density=0.05",
        f"{passed_over}DGC(density=1.0",
        f"{passed_over}<class 'horovod.tensorflow.compression.FP16Compressor'>",
    )
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=none)
    assert optimizer.distribution.method.name == "none", "without the variable nothing changes"


@horovod_only
def an_environment_of_some_ranks_only_is_an_error_on_all() -> None:
    """Whoever asks first: an optimizer, or a tape in a graph."""
    text = "topk:density=0.05" if hvd.rank() == 0 else None
    variable = tf.Variable(tf.ones([4]))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(variable**2)
        return hvd.DistributedGradientTape(tape).gradient(y, [variable])

    for begin in (lambda: hvd_keras.DistributedOptimizer(sgd()), step):
        compared.clear()
        words = "rank 0: 'topk:density=0.05'", "rank 1: not set", "-x HVD_COMPRESSION"
        with environment(text), raises(MismatchError, *words):
            begin()
    step()
