"""tf_keras, Keras 2: ``TF_USE_LEGACY_KERAS=1``."""

from __future__ import annotations

import horovod.tensorflow.keras
import numpy as np
import tensorflow as tf
import tf_keras

import hvd_compress.tensorflow as hvd
import hvd_compress.tensorflow.keras as hvd_keras
from hvd_compress import DGC, TopK
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.tensorflow.optimizer import CompressedOptimizer
from tests.scenarios import oracle
from tests.scenarios.driver import assert_close, assert_same_everywhere, raises
from tests.scenarios.environment import environment


def _model():
    hidden = [tf_keras.layers.Dense(width, activation="tanh") for width in oracle.WIDTHS[1:-1]]
    model = tf_keras.Sequential(
        [tf_keras.Input((oracle.WIDTHS[0],)), *hidden, tf_keras.layers.Dense(oracle.WIDTHS[-1])]
    )
    model.set_weights(list(oracle.initial_weights("mlp").values()))
    return model


def _fit(optimizer, callbacks=(), *, graph: bool = False, **options):
    """Without a graph unless it is what is tested, since each takes seconds to trace."""
    model = _model()
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, run_eagerly=not graph, **options)
    batches = [oracle.batch("mlp", hvd.rank(), step) for step in range(6)]
    x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=list(callbacks))
    return dict(zip(oracle.initial_weights("mlp"), model.get_weights(), strict=True))


def _sgd():
    return tf_keras.optimizers.SGD(oracle.LR, momentum=0.9)


def it_is_keras_2() -> None:
    assert tf.keras.layers.Dense is tf_keras.layers.Dense


def fit_is_the_oracle() -> None:
    for module in (hvd_keras, horovod.tensorflow.keras):
        weights = _fit(module.DistributedOptimizer(_sgd(), compression=DGC(density=1.0)))
        assert_close(weights, oracle.dense(range(6), hvd.size()))
    method = DGC(density=0.05)
    for graph in (True, False):
        optimizer = hvd_keras.DistributedOptimizer(_sgd(), compression=method)
        weights = _fit(optimizer, graph=graph)
        assert_same_everywhere(weights)
        assert_close(weights, oracle.compressed(method, range(6), hvd.size()), 1e-3, 1e-4)
    adam = tf_keras.optimizers.Adam(0.001)
    assert_same_everywhere(_fit(hvd_keras.DistributedOptimizer(adam, compression=TopK)))


def callbacks_work() -> None:
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.CompressionCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1),
    ]
    optimizer = hvd_keras.DistributedOptimizer(_sgd(), compression=DGC(density=0.05))
    assert_same_everywhere(_fit(optimizer, callbacks, metrics=["accuracy"]))
    assert abs(float(optimizer.learning_rate) - 0.1) < 1e-6


def a_commit_is_what_restore_goes_back_to() -> None:
    for optimizer in (
        hvd_keras.DistributedOptimizer(_sgd(), compression=DGC(density=0.05)),
        hvd_keras.DistributedOptimizer(tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9)),
    ):
        model = _model()
        loss = tf_keras.losses.SparseCategoricalCrossentropy(True)
        model.compile(optimizer, loss=loss, run_eagerly=True)
        x, y = oracle.batch("mlp", hvd.rank(), 0)
        model.fit(x, y, verbose=0)  # the older one makes its variables now
        state = hvd_keras.elastic.KerasState(model, epoch=0)
        runs = []
        for _ in range(2):
            model.fit(x, y, epochs=2, shuffle=False, verbose=0)
            runs.append(model.get_weights())
            state.restore()
        assert all((a == b).all() for a, b in zip(*runs, strict=True))
        assert_same_everywhere({str(i): w for i, w in enumerate(runs[0])})


def older_optimizers_are_refused() -> None:
    old = tf_keras.optimizers.legacy.SGD(0.1)
    for module in (hvd, hvd_keras, horovod.tensorflow.keras):
        with raises(UnsupportedError, "legacy are not supported: use tf_keras.optimizers.SGD"):
            module.DistributedOptimizer(old, compression=DGC)
    with raises(ConfigError, "method=", "keras.optimizers of Keras 3", "leave method out"):
        hvd_keras.DistributedOptimizer(_sgd(), method=hvd_keras.ExactDiffusion("cycle"))


def without_a_method_it_is_horovods_own() -> None:
    """Whichever import line it comes by; options arrive, also those that the factory of
    ``horovod.tensorflow`` does not hand on."""
    plain = type(horovod.tensorflow.keras.DistributedOptimizer(_sgd()))
    for module in (hvd, hvd_keras, horovod.tensorflow.keras):
        optimizer = module.DistributedOptimizer(_sgd(), seed=1)
        assert type(optimizer).__dict__.keys() == plain.__dict__.keys()
        optimizer = module.DistributedOptimizer(_sgd(), compression=hvd.Compression.fp16)
        assert type(optimizer).__dict__.keys() == plain.__dict__.keys()
    halved = tf_keras.optimizers.SGD(oracle.LR / hvd.size(), momentum=0.9)
    weights = _fit(hvd.DistributedOptimizer(halved, op=hvd.Sum))
    assert_close(weights, oracle.dense(range(6), hvd.size()))
    with environment("topk:density=0.05"):
        assert isinstance(hvd_keras.DistributedOptimizer(_sgd()), CompressedOptimizer)


def a_callback_for_methods_has_nothing_to_do_without_one() -> None:
    callbacks = [hvd_keras.callbacks.CompressionCallback()]
    weights = _fit(hvd_keras.DistributedOptimizer(_sgd()), callbacks)
    assert_close(weights, oracle.dense(range(6), hvd.size()))
    with raises(ConfigError, "made by hvd.DistributedOptimizer"):
        _fit(_sgd(), callbacks)


def loss_scaling_outside_of_it_is_refused() -> None:
    optimizer = hvd_keras.DistributedOptimizer(_sgd(), compression=DGC(density=0.05))
    with raises(UnsupportedError, r"hvd.DistributedOptimizer\(LossScaleOptimizer\(optimizer\)\)"):
        tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
    horovods = tf_keras.mixed_precision.LossScaleOptimizer(hvd_keras.DistributedOptimizer(_sgd()))
    assert_close(_fit(horovods), oracle.dense(range(6), hvd.size()))
