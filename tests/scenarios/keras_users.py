"""What users of Horovod's Keras bring along: its import lines, callbacks and options."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path

import horovod.keras
import horovod.tensorflow
import horovod.tensorflow.keras
import keras
import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
import hvd_compress.tensorflow.keras as hvd_keras
from hvd_compress import DGC, FP16, TopK
from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.integrations.environment import compared
from tests.scenarios import oracle
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    barrier,
    make,
    raises,
    train,
)
from tests.scenarios.driver_tensorflow import model_of
from tests.scenarios.environment import assert_said, environment

SPARSE = DGC(density=0.05)
DENSE = DGC(density=1.0)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _sgd(lr: float = oracle.LR) -> keras.optimizers.SGD:
    return keras.optimizers.SGD(lr, momentum=0.9)


def _weights(model) -> dict[str, np.ndarray]:
    return dict(zip(oracle.initial_weights("mlp"), model.get_weights(), strict=True))


def _fit(optimizer, callbacks=(), *, model=None, steps=8, epochs=1, metrics=(), **options):
    """Metrics that Keras makes in the graph let it be traced twice."""
    model = model or model_of("mlp")
    if optimizer is not None:
        model.compile(optimizer, loss=LOSS, metrics=metrics)
        # Else the graph would be traced twice: once while variables are made.
        optimizer.build(model.trainable_variables)
    batches = [oracle.batch("mlp", hvd.rank(), step) for step in range(steps)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": epochs, **options}
    return model, model.fit(x, y, callbacks=list(callbacks), **options).history


def horovods_own_import_lines_and_callbacks() -> None:
    """Broadcast, averages and both schedules, which are the same in all modules that users take
    them from."""
    own = horovod.keras.callbacks
    callbacks = [
        own.BroadcastGlobalVariablesCallback(0),
        own.MetricAverageCallback(device="/cpu:0"),
        own.LearningRateWarmupCallback(oracle.LR, warmup_epochs=1, verbose=1),
        own.LearningRateScheduleCallback(oracle.LR, 0.5, start_epoch=1),
    ]
    for module in (horovod.tensorflow.keras, hvd_keras):
        for callback in callbacks:
            assert getattr(module.callbacks, type(callback).__name__) is type(callback)
    model = model_of("mlp")
    if hvd.rank() > 0:
        model.set_weights([w + 1 for w in model.get_weights()])
    # With an optimizer of each module: keras_fit.horovods_own_import_lines_work.
    optimizer = horovod.tensorflow.keras.DistributedOptimizer(_sgd(), compression=SPARSE)
    model, history = _fit(optimizer, callbacks, model=model, epochs=3, metrics=["accuracy"])
    assert_same_everywhere(_weights(model))
    assert_same_everywhere({k: np.array(history[k]) for k in ("loss", "accuracy")})
    np.testing.assert_allclose(history["lr"], oracle.LR * np.array([1, 1, 0.5]), rtol=1e-6)


def a_number_multiplies_the_rate_every_epoch() -> None:
    for staircase, rates in ((True, [1.0] * 4 + [0.5] * 4), (False, 0.5 ** (np.arange(8) / 4))):
        seen: list[float] = []

        class Watch(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None, seen=seen):
                seen.append(float(np.asarray(self.model.optimizer.learning_rate)))

        schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.5, staircase=staircase)
        _fit(_sgd(), [schedule, Watch()], steps=4, epochs=2)
        np.testing.assert_allclose(seen, 0.1 * np.array(rates), rtol=1e-6)
    with raises(ConfigError, "initial_lr"):
        hvd_keras.callbacks.LearningRateScheduleCallback(None, 0.5)


def some_variables_keep_what_their_rank_has() -> None:
    model = model_of("mlp")
    model.set_weights([w + hvd.rank() for w in model.get_weights()])
    kernel, bias, *_ = model.trainable_variables
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, "", [kernel])
    broadcast.register_local_var(bias)
    frozen = keras.optimizers.SGD(0.0)
    model, _ = _fit(hvd_keras.DistributedOptimizer(frozen), [broadcast], model=model, steps=1)
    initial = oracle.initial_weights("mlp")
    for name, weight in _weights(model).items():
        offset = hvd.rank() if name in ("kernel0", "bias0") else 0
        np.testing.assert_allclose(weight, initial[name] + offset, rtol=1e-6)
    with raises(ConfigError, "local_variables"):
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3])


def layers_may_stay_local() -> None:
    """``PartialDistributedOptimizer`` is ``register_local_var`` for the weights of layers."""
    models = []
    for module in (horovod.keras, hvd_keras):
        model = model_of("mlp")
        optimizer = module.PartialDistributedOptimizer(
            _sgd(), compression=DENSE, local_layers=model.layers[0], scale_local_gradients=False
        )
        models.append(_fit(optimizer, model=model)[0])
        assert len(optimizer.compression.store.slots) == 2
    model = model_of("mlp")
    optimizer = hvd_keras.DistributedOptimizer(
        _sgd(), compression=DENSE, scale_local_gradients=False
    )
    for variable in model.layers[0].trainable_variables:
        optimizer.register_local_var(variable)
    models.append(_fit(optimizer, model=model)[0])
    for other in models[1:]:
        assert_close(_weights(other), _weights(models[0]), 0, 0)
    shared = {k: w for k, w in _weights(model).items() if k not in ("kernel0", "bias0")}
    assert_same_everywhere(shared)
    kernels = hvd.allgather(_weights(model)["kernel0"][None], name="kernels").numpy()
    assert hvd.size() == 1 or np.ptp(kernels, 0).max() > 0
    with raises(ConfigError, "local_layers"):
        hvd_keras.PartialDistributedOptimizer(_sgd(), local_layers=["dense"])


def the_best_model_is_kept() -> None:
    classes = (
        (horovod.keras.callbacks.BestModelCheckpoint, ("loss", 0, "min")),
        (horovod.tensorflow.keras.callbacks.BestModelCheckpoint, ("loss", 0, True, "min")),
        (hvd_keras.callbacks.BestModelCheckpoint, ("loss", 0, False, "min", "epoch")),
    )
    folder = Path(tempfile.mkdtemp())
    checkpoints = []
    for i, (cls, options) in enumerate(classes):
        checkpoints.append(cls(*options))
        kind = ".weights.h5" if True in options else ".keras"
        checkpoints[i].filepath = str(folder / f"{i}{kind}")
    after: list[dict[str, np.ndarray]] = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            after.append(_weights(self.model))

    callbacks = [
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.CompressionCallback(),
        *checkpoints,
        Watch(),
        # What comes after the best epoch is worse.
        hvd_keras.callbacks.LearningRateScheduleCallback(oracle.LR, lambda e: 100.0 ** (e > 1)),
    ]
    optimizer = hvd_keras.DistributedOptimizer(_sgd(), compression=SPARSE)
    model, history = _fit(optimizer, callbacks, epochs=4)
    number = int(np.argmin(history["loss"]))
    assert number < 3
    for best in checkpoints:
        model.set_weights([w + 1 for w in model.get_weights()])
        model.load_weights(best.filepath)
        assert_close(_weights(model), after[number], 0, 0)
    with raises(ConfigError, "filepath="):
        _fit(_sgd(), [hvd_keras.callbacks.BestModelCheckpoint("loss")])
    assert hvd_keras.callbacks.BestModelCheckpoint(filepath="x.keras").filepath == "x.keras"


def a_commit_is_what_restore_goes_back_to() -> None:
    callbacks_of = "CommitStateCallback", "UpdateBatchStateCallback", "UpdateEpochStateCallback"
    for name in ("KerasState", *callbacks_of):
        ours = getattr(hvd_keras.elastic, name)
        assert getattr(horovod.tensorflow.keras.elastic, name) is ours
    for module in (hvd_keras, horovod.keras):
        optimizer = hvd_keras.DistributedOptimizer(_sgd(), compression=SPARSE)
        model = model_of("mlp")
        model.compile(optimizer, loss=LOSS)
        optimizer.build(model.trainable_variables)
        state = module.elastic.KerasState(model, batch=0, epoch=0)
        callbacks = [
            module.elastic.CommitStateCallback(state),
            module.elastic.UpdateBatchStateCallback(state),
            module.elastic.UpdateEpochStateCallback(state),
        ]
        _fit(None, callbacks, model=model, steps=4)
        assert (state.epoch, state.batch) == (1, 0)
        state.commit()
        weights, waits = _weights(model), optimizer.compression.values()
        runs = []
        for _ in range(2):
            _fit(None, model=model, steps=4)
            runs.append(_weights(model))
            state.epoch = 7
            state.restore()
            assert state.epoch == 1
            assert_close(_weights(model), weights, 0, 0)
            for key, value in optimizer.compression.values().items():
                np.testing.assert_array_equal(value, waits[key])
        assert_close(runs[0], runs[1], 0, 0)


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


def states_that_cannot_be_kept_are_refused() -> None:
    model = model_of("mlp")
    adam = hvd_keras.ZeroOneAdam(1e-3)
    optimizer = hvd_keras.DistributedOptimizer(adam, compression=adam.compressor())
    with raises(UnsupportedError, "OneBitAdam"):
        hvd_keras.elastic.KerasState(model, optimizer)
    with raises(ValueError, "not built"):
        hvd_keras.elastic.KerasState(keras.Sequential([keras.layers.Dense(3)]), _sgd())


def the_environment_names_a_method_for_scripts_that_say_none() -> None:
    none, fp16 = hvd.Compression.none, hvd.Compression.fp16
    with environment("topk:density=0.05") as lines:
        for module in (horovod.tensorflow.keras, horovod.keras, hvd_keras, hvd):
            for options in ({}, {"compression": none}):
                optimizer = module.DistributedOptimizer(_sgd(), **options)
                assert optimizer.distribution.method == TopK(density=0.05)
            if module in (horovod.keras, hvd_keras):
                _fit(optimizer, steps=2)
                assert optimizer.compression.stats().total.ratio > 5
            optimizer = module.DistributedOptimizer(_sgd(), compression=DENSE)
            assert optimizer.distribution.method == DENSE
        assert (
            hvd_keras.DistributedOptimizer(_sgd(), compression=fp16).distribution.method == FP16()
        )
        variable = tf.Variable(tf.ones([40, 40]))
        for module in (hvd, horovod.tensorflow):
            with tf.GradientTape() as tape:
                y = tf.reduce_sum(variable**2)
            tape = module.DistributedGradientTape(tape, compression=none)
            tape.gradient(y, [variable])
            assert tape.compression.method == TopK(density=0.05)
        path = Path(tempfile.mkdtemp()) / "model.keras"
        plain = model_of("mlp")
        plain.compile(_sgd(), loss=LOSS)
        plain.optimizer.build(plain.trainable_variables)
        plain.save(path)
        for load in (hvd_keras.load_model, horovod.keras.load_model):
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
    optimizer = hvd_keras.DistributedOptimizer(_sgd(), compression=none)
    assert optimizer.distribution.method.name == "none", "without the variable nothing changes"


def an_environment_of_some_ranks_only_is_an_error_on_all() -> None:
    """Whoever asks first: an optimizer, or a tape in a graph."""
    text = "topk:density=0.05" if hvd.rank() == 0 else None
    variable = tf.Variable(tf.ones([4]))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(variable**2)
        return hvd.DistributedGradientTape(tape).gradient(y, [variable])

    for begin in (lambda: hvd_keras.DistributedOptimizer(_sgd()), step):
        compared.clear()
        words = "rank 0: 'topk:density=0.05'", "rank 1: not set", "-x HVD_COMPRESSION"
        with environment(text), raises(MismatchError, *words):
            begin()
    step()


def distributed_optimizers_are_not_copied() -> None:
    """The error says how a plain one is had, from which a new one is made."""
    optimizer = hvd.DistributedOptimizer(_sgd(0.3), compression=SPARSE)
    copies = (
        copy.copy,
        copy.deepcopy,
        pickle.dumps,
        lambda o: type(o).from_config(o.get_config()),
    )
    for copied in copies:
        with raises(UnsupportedError, "make the plain optimizer from it"):
            copied(optimizer)
    plain = type(optimizer).__bases__[-1].from_config(optimizer.get_config())
    assert type(plain) is keras.optimizers.SGD
    assert float(np.asarray(plain.learning_rate)) == np.float32(0.3)
    hvd.DistributedOptimizer(plain, compression=SPARSE)


def optimizers_of_keras_2() -> None:
    """Given to the drop-in while ``tf.keras`` is Keras 3."""
    import tf_keras

    old = tf_keras.optimizers.legacy.SGD(0.1)
    for module in (hvd, hvd_keras, horovod.keras):
        with raises(UnsupportedError, "legacy are not supported: use tf_keras.optimizers.SGD"):
            module.DistributedOptimizer(old, compression=SPARSE)
    with raises(UnsupportedError, "legacy_opts"):
        hvd_keras.load_model("model.keras", legacy_opts=True)
    barrier()


def a_graph_does_not_choose_its_method() -> None:
    """Where nothing can change it later, the error says what to write."""
    for wrong in ("auto", "auto:accuracy=feedback"):
        with raises(ConfigError, "advise --measure"):
            hvd.DistributedOptimizer(_sgd(), compression=wrong)
        weight = tf.Variable([1.0, 2.0])
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=wrong) as tape:
            loss = tf.reduce_sum(weight * weight)
        with raises(ConfigError, "advise --measure"):
            tape.gradient(loss, [weight])
