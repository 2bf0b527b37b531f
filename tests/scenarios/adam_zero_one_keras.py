"""0/1 Adam in Keras: what is traced, saved, met by callbacks, kept local, and refused."""

from __future__ import annotations

import functools
import tempfile
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError
from tests.scenarios import oracle
from tests.scenarios.adam_zero_one import LR, SCHEDULE, run_of
from tests.scenarios.driver import (
    assert_close,
    assert_same_everywhere,
    barrier,
    everything,
    raises,
    train,
)
from tests.scenarios.driver_tensorflow import hvd, hvd_keras, model_of
from tests.scenarios.optimizers_keras import LOSS, fit, weights_of


def _distributed(options: Any = None, **adam_options: Any) -> Any:
    adam = hvd_keras.ZeroOneAdam(LR, **{**SCHEDULE, **adam_options})
    return hvd_keras.DistributedOptimizer(
        adam, compression=adam.compressor(min_size=0), **(options or {})
    )


def _compiled(**options: Any) -> Any:
    model = model_of("mlp")
    model.compile(_distributed(**options), loss=LOSS)
    model.optimizer.build(model.trainable_variables)  # so that the graph is traced once
    return model


@functools.cache
def _traced() -> tuple[Any, Any]:
    """A run in a graph, and its weights after each step."""
    run, found = run_of(eps=0.0), {}
    for steps in range(1, 25):
        found[steps] = train(run, [steps - 1]).weights()
    return run, found


def the_graph_is_traced_once() -> None:
    run, _ = _traced()
    assert run.graph.experimental_get_tracing_count() == 1
    run.optimizer.synchronize_parameters()
    train(run, range(24, 32))
    assert run.graph.experimental_get_tracing_count() == 1


def eager_steps_are_the_same() -> None:
    eager, (_, traced) = run_of(eps=0.0), _traced()
    eager.graph = eager._step
    train(eager, range(23))
    assert_close(eager.weights(), traced[23], rtol=1e-9, atol=1e-12)


def sums_take_the_same_steps_at_another_scale() -> None:
    """Adam divides by the root of squares: but for epsilon, sums and averages are one."""
    sums, (_, average) = run_of(make_options={"op": hvd.Sum}, eps=0.0), _traced()
    assert_close(train(sums, range(24)).weights(), average[24], rtol=1e-7, atol=1e-9)


def several_passes_are_a_step() -> None:
    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    run = train(run_of(make_options=options), range(24), passes=2)
    assert int(run.compression.step) == 24
    assert_same_everywhere(run.weights())
    train(run, [24], passes=2)
    run.optimizer.synchronize_parameters()
    assert_same_everywhere(run.weights())


def models_are_saved_and_go_on() -> None:
    model = _compiled()
    fit(model, range(27))  # 28 synchronizes
    model.optimizer.synchronize_parameters()
    model.optimizer.compression.consolidate()
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0, name="folder"))
    if hvd.rank() == 0:
        model.save(folder / "model.keras")  # warnings are errors here
        whole = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        whole.write(str(folder / "checkpoint"))
    barrier()
    method = model.optimizer.compression.method
    loaded = hvd_keras.load_model(folder / "model.keras", compression=method)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    restored = _compiled()
    whole = tf.train.Checkpoint(model=restored, optimizer=restored.optimizer)
    whole.restore(str(folder / "checkpoint")).expect_partial()
    for other in (loaded, restored):
        assert int(other.optimizer.compression.step) == 27
        assert int(other.optimizer._variance_steps) == 6
        for ours, theirs in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        for i, state in model.optimizer.compression.store.states.items():
            for key, x in state.items():
                np.testing.assert_array_equal(other.optimizer.compression.store.states[i][key], x)
        assert_close(weights_of(other), weights_of(model), 0, 0)
    # With all variables equal, one more graph is left to tests that are marked as full.
    others = [loaded, restored] if everything else [loaded]
    for m in (model, *others):
        fit(m, range(27, 34))
        m.optimizer.synchronize_parameters()
        assert_same_everywhere(weights_of(m))
    for other in others:
        assert_close(weights_of(other), weights_of(model), 1e-4, 1e-5)


def each_rank_may_save_its_own_between_synchronizations() -> None:
    model = _compiled()
    fit(model, range(27))
    path = Path(tempfile.mkdtemp()) / "model.keras"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save(path)
    assert hvd.size() == 1 or any(
        "optimizer.synchronize_parameters()" in str(w.message) for w in caught
    )
    method = model.optimizer.compression.method
    loaded = hvd_keras.load_model(path, compression=method)
    for m in (model, loaded):
        fit(m, range(27, 34))
        m.optimizer.synchronize_parameters()
        assert_same_everywhere(weights_of(m))
    assert_close(weights_of(loaded), weights_of(model), 1e-4, 1e-5)


class _SameEverywhere(keras.callbacks.Callback):
    """Behind the callback that makes it so."""

    def __init__(self) -> None:
        super().__init__()
        self.checks = 0

    def on_test_begin(self, logs: Any = None) -> None:
        self.checks += 1
        assert_same_everywhere(weights_of(self.model))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.on_test_begin()


def the_callback_synchronizes_before_validation_and_after_epochs() -> None:
    model = _compiled()
    batches = [oracle.batch("mlp", hvd.rank(), step) for step in range(9)]
    x, y = (np.concatenate([batch[i] for batch in batches]) for i in (0, 1))
    check = _SameEverywhere()
    path = str(Path(tempfile.mkdtemp()) / "model.keras")
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.CompressionCallback(),
        check,
        keras.callbacks.ModelCheckpoint(path),  # warnings are errors here
    ]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=3, validation_data=(x, y), callbacks=callbacks, **options)
    assert check.checks == 6


def local_variables_go_their_own_way() -> None:
    """With the variance of the steps at which it learns, and without synchronizations."""
    variables = [tf.Variable(np.ones(40)), tf.Variable(np.ones(40))]
    optimizer = _distributed(epsilon=0.0)
    optimizer.register_local_var(variables[1])
    shared = hvd_keras.ZeroOneAdam(LR, **SCHEDULE, epsilon=0.0)
    alone = [tf.Variable(np.ones(40))]
    random = np.random.default_rng(hvd.rank())
    for step in range(24):
        own = random.normal(size=40)
        optimizer.apply([tf.constant(own), tf.constant(own)], variables)
        if step < 23:
            shared.apply([tf.constant(own / hvd.size())], alone)
    assert_same_everywhere({"shared": variables[0].numpy()})
    shared.apply([tf.constant(own / hvd.size())], alone)
    np.testing.assert_allclose(variables[1].numpy(), alone[0].numpy(), rtol=1e-9)


def constraints_hold_after_synchronizations() -> None:
    variables = [keras.Variable(np.zeros(40), dtype="float64", name="w")]
    variables[0].constraint = keras.constraints.NonNeg()
    optimizer = _distributed()
    random = np.random.default_rng(hvd.rank())
    for _ in range(28):
        optimizer.apply([tf.constant(random.normal(size=40))], variables)
        assert (np.asarray(variables[0]) >= 0).all()
    assert_same_everywhere({"w": np.asarray(variables[0])})


def what_cannot_work_is_refused() -> None:
    adam = hvd_keras.ZeroOneAdam(**SCHEDULE)
    scaled = keras.optimizers.LossScaleOptimizer(adam)
    with raises(ConfigError, "loss scaling", "bfloat16"):
        hvd_keras.DistributedOptimizer(scaled, compression=adam.compressor())
    with raises(ConfigError, "sparse_as_dense=True"):
        train(run_of(make_options={"kind": "words"}), [0])
    with raises(ConfigError, "use_ema"):
        _distributed(use_ema=True).build([tf.Variable(np.ones(40))])
