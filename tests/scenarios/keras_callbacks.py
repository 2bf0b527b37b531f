"""Callbacks, elastic states and the environment in Keras, by Horovod's import lines and ours."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

from hvd_compress import EF21, FP16, TopK
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
from tests.scenarios.driver_tensorflow import HOROVODS, hvd, hvd_keras, model_of, traced
from tests.scenarios.environment import assert_said, environment
from tests.scenarios.keras_fit import DENSE, LOSS, SPARSE, fit, sgd, weights_of


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
    own, watch = (HOROVODS or [hvd_keras])[-1].callbacks, _Watch()
    device = {"device": "/cpu:0"} if HOROVODS else {}
    callbacks = [
        own.BroadcastGlobalVariablesCallback(0),
        own.MetricAverageCallback(**device),
        own.LearningRateWarmupCallback(oracle.LR, warmup_epochs=1, verbose=1),
        own.LearningRateScheduleCallback(oracle.LR, 0.5, start_epoch=1),
    ]
    for module in (hvd_keras, *HOROVODS[1:]):
        for callback in callbacks:
            assert getattr(module.callbacks, type(callback).__name__) is type(callback)
    model = model_of("mlp")
    if hvd.rank() > 0:
        model.set_weights([w + 1 for w in model.get_weights()])
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    callbacks += [hvd_keras.callbacks.CompressionCallback(), watch]
    options = {"steps": 3, "epochs": 3, "metrics": ["accuracy"]}
    model, history = fit(optimizer, callbacks, model=model, **options)
    assert float(optimizer.compression.epoch) == 2
    assert_same_everywhere(weights_of(model))
    assert_same_everywhere({k: np.array(history[k]) for k in ("loss", "accuracy")})
    np.testing.assert_allclose(history["lr"], oracle.LR * np.array([1, 1, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(watch.rates[3:], oracle.LR * np.repeat([1, 0.5], 3), rtol=1e-6)


@applies(least=2)
def what_is_built_on_one_rank_is_sent_to_all() -> None:
    """As a checkpoint is that was loaded there alone.  A model that has no variables elsewhere is
    an error on all ranks."""
    send, first = hvd_keras.callbacks.BroadcastGlobalVariablesCallback, hvd.rank() == 0
    for optimizer, is_eager in (
        (hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE), False),
        (keras.optimizers.Adam(0.0), True),
    ):
        model = model_of("mlp")
        model.compile(optimizer, loss=LOSS, run_eagerly=is_eager)
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
            is_eager = not isinstance(callback, own.CompressionCallback)
            fit(optimizer, [callback], steps=3 if hvd.rank() else 2, run_eagerly=is_eager)
        barrier()


def velocities_follow_a_rate_that_a_number_multiplies_every_epoch() -> None:
    """Momentum correction: Keras's velocity, which has the rate in it, goes on as if it had been
    gathered with the new one."""
    rates = np.float32(oracle.LR * 0.5 ** (np.arange(8) / 4))
    for correct in (True, False):
        watch = _Watch()
        schedule = hvd_keras.callbacks.LearningRateScheduleCallback(
            oracle.LR, 0.5, staircase=False, momentum_correction=correct
        )
        model, _ = fit(sgd(), [schedule, watch], steps=4, epochs=2, run_eagerly=True)
        np.testing.assert_allclose(watch.rates, rates, rtol=1e-6)
        weights = oracle.initial_weights("mlp")
        velocity = {k: 0 * w for k, w in weights.items()}
        for step, rate in enumerate(rates):
            g = oracle.gradients("mlp", weights, hvd.rank(), step % 4)
            for k in weights:
                velocity[k] = 0.9 * velocity[k] + g[k]
                weights[k] = weights[k] - rate * velocity[k]
        error = max(np.abs(w - weights[k]).max() for k, w in weights_of(model).items())
        assert (error < 1e-5) == correct
    with raises(ConfigError, "initial_lr"):
        hvd_keras.callbacks.LearningRateScheduleCallback(None, 0.5)


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
        (HOROVODS[2], ("loss", 0, "min")),
        (HOROVODS[1], ("loss", 0, True, "min")),
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
        *(checkpoints if hvd.rank() == 0 else []),
        watch,
        # What comes after the best epoch is worse.
        hvd_keras.callbacks.LearningRateScheduleCallback(oracle.LR, lambda e: 100.0 ** (e > 1)),
    ]
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    model, history = fit(optimizer, callbacks, steps=3, epochs=3, run_eagerly=True)
    number = int(np.argmin(history["loss"]))
    assert number == 1
    for best in checkpoints if hvd.rank() == 0 else []:
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
        assert getattr(HOROVODS[1].elastic, name) is getattr(hvd_keras.elastic, name)
    for module in (hvd_keras, HOROVODS[-1]):
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
    """The last rank comes new: it begins like the others, who keep among them what waited.  The
    mean of EF21's estimates is the mean estimate, whoever has come or gone."""
    is_new, begun = hvd.rank() == hvd.size() - 1 and hvd.size() > 1, max(hvd.size() - 1, 1)
    for method in (EF21(density=0.05), SPARSE):
        # The new one counts layers anew, and has the others' names.
        keras.utils.clear_session(free_memory=False)
        run = train(make(method), range(3))
        waited = {key: x for key, x in run.states().items() if key.endswith("residual")}
        if is_new:
            keras.utils.clear_session(free_memory=False)
            run, waited = make(method), {key: 0 * x for key, x in waited.items()}
        state = hvd.elastic.TensorFlowKerasState(run.model, run.optimizer, step=0 if is_new else 3)
        state.sync()
        assert state.step == int(run.compression.step) == 3
        states = run.states()
        assert_same_everywhere(run.weights() | states)
        for key, x in waited.items():
            total = hvd.allreduce(tf.constant(x), op=hvd.Sum, name=f"waited.{key}")
            np.testing.assert_allclose(states[key] * begun, total, rtol=1e-4, atol=1e-6)
        for key, x in states.items():
            if key.endswith(".estimate"):
                mean = states[key.replace(".estimate", ".mean_estimate")]
                np.testing.assert_array_equal(x, mean)
        assert any(map(np.any, states.values()))
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
    with environment("topk:density=0.05") as lines:
        for module in (*HOROVODS[1:], hvd_keras, hvd):
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
        for module in (hvd, HOROVODS[0]):
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
        for load in (hvd_keras.load_model, HOROVODS[2].load_model):
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
@applies(least=2)  # one rank has nobody to differ from
def an_environment_of_some_ranks_only_is_an_error_on_all() -> None:
    """Whoever asks first: an optimizer, or a tape in a graph."""
    text = "topk:density=0.05" if hvd.rank() == 0 else None
    variable = tf.Variable(tf.ones([4]))

    @traced
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
