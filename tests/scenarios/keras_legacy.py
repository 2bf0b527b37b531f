"""tf_keras, Keras 2, beside scenarios that both versions have: ``TF_USE_LEGACY_KERAS=1``."""

from __future__ import annotations

import tensorflow as tf
import tf_keras

from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.tensorflow.optimizer import KerasCompressedOptimizer
from tests.scenarios import oracle
from tests.scenarios.driver import assert_close, assert_same_everywhere, raises
from tests.scenarios.driver_tensorflow import HOROVODS, hvd, hvd_keras, model_of
from tests.scenarios.environment import environment
from tests.scenarios.keras_fit import DENSE, LOSS, SPARSE, data, sgd, weights_of
from tests.scenarios.keras_fit import fit as fit_any

MODULES = (hvd, hvd_keras, *HOROVODS[1:])


def _fit(optimizer, callbacks=(), **options):
    """Without a graph, since each takes seconds to trace."""
    options |= {"run_eagerly": True, "built": False}
    return weights_of(fit_any(optimizer, callbacks, steps=6, **options)[0])


def it_is_keras_2() -> None:
    assert tf.keras.layers.Dense is tf_keras.layers.Dense
    assert type(model_of("mlp")) is tf_keras.Sequential


def every_door_trains() -> None:
    for module in MODULES[1:]:
        weights = _fit(module.DistributedOptimizer(sgd(), compression=DENSE))
        assert_close(weights, oracle.dense(range(6), hvd.size()))
    adam = hvd_keras.DistributedOptimizer(tf_keras.optimizers.Adam(0.001), compression="topk")
    assert_same_everywhere(_fit(adam))


def older_optimizers_are_restored_by_elastic_states_and_otherwise_refused() -> None:
    older, model = tf_keras.optimizers.legacy.SGD(0.1, momentum=0.9), model_of("mlp")
    for module in MODULES:
        with raises(UnsupportedError, "legacy are not supported: use tf_keras.optimizers.SGD"):
            module.DistributedOptimizer(older, compression=SPARSE)
    model.compile(hvd_keras.DistributedOptimizer(older), loss=LOSS, run_eagerly=True)
    model.fit(*data(1), verbose=0)  # which makes its variables
    state, runs = hvd_keras.elastic.KerasState(model, epoch=0), []
    for _ in range(2):
        model.fit(*data(1), epochs=2, shuffle=False, verbose=0)
        runs.append(weights_of(model))
        state.restore()
    assert_close(*runs, 0, 0)
    assert_same_everywhere(runs[0])


def training_methods_are_refused() -> None:
    with raises(ConfigError, "method=", "keras.optimizers of Keras 3", "leave method out"):
        hvd_keras.DistributedOptimizer(sgd(), method=hvd_keras.ExactDiffusion("cycle"))


def without_a_method_it_is_horovods_own() -> None:
    """Whichever import line it comes by; options arrive, also those that the factory of
    ``horovod.tensorflow`` does not hand on."""
    plain = type(HOROVODS[1].DistributedOptimizer(sgd()))
    for module in MODULES:
        for options in ({"seed": 1}, {"compression": hvd.Compression.fp16}):
            optimizer = module.DistributedOptimizer(sgd(), **options)
            assert type(optimizer).__dict__.keys() == plain.__dict__.keys()
    weights = _fit(hvd.DistributedOptimizer(sgd(oracle.LR / hvd.size()), op=hvd.Sum))
    assert_close(weights, oracle.dense(range(6), hvd.size()))
    with environment("topk:density=0.05"):
        assert isinstance(hvd_keras.DistributedOptimizer(sgd()), KerasCompressedOptimizer)


def a_callback_for_methods_has_nothing_to_do_without_one() -> None:
    callbacks = [hvd_keras.callbacks.CompressionCallback()]
    weights = _fit(hvd_keras.DistributedOptimizer(sgd()), callbacks)
    assert_close(weights, oracle.dense(range(6), hvd.size()))
    with raises(ConfigError, "made by hvd.DistributedOptimizer"):
        _fit(sgd(), callbacks)


def loss_scaling_outside_of_it_is_refused() -> None:
    optimizer = hvd_keras.DistributedOptimizer(sgd(), compression=SPARSE)
    with raises(UnsupportedError, r"hvd.DistributedOptimizer\(LossScaleOptimizer\(optimizer\)\)"):
        tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
    horovods = tf_keras.mixed_precision.LossScaleOptimizer(hvd_keras.DistributedOptimizer(sgd()))
    assert_close(_fit(horovods), oracle.dense(range(6), hvd.size()))
