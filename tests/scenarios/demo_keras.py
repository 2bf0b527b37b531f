"""DeMo in Keras: what is saved, decayed, scaled, and refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hvd_compress.errors import ConfigError
from tests.scenarios.adam_keras import LOSS, fit, weights_of
from tests.scenarios.driver import assert_close, assert_same_everywhere, barrier, raises
from tests.scenarios.driver_tensorflow import hvd, hvd_keras, model_of


def _optimizer(**options):
    demo = hvd_keras.DeMo(0.003, **{"chunk": 8, "top_k": 4, **options})
    return hvd_keras.DistributedOptimizer(demo, compression=demo.compressor())


def models_are_saved_and_go_on() -> None:
    model = model_of("mlp")
    model.compile(_optimizer(weight_decay=0.01), loss=LOSS)
    fit(model, range(5))
    model.optimizer.compression.consolidate()
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0, name="folder"))
    if hvd.rank() == 0:
        model.save(folder / "model.keras")
    barrier()
    method = model.optimizer.compression.method
    loaded = hvd_keras.load_model(folder / "model.keras", compression=method)
    assert (loaded.optimizer.chunk, loaded.optimizer.weight_decay) == (8, 0.01)
    assert int(loaded.optimizer.compression.step) == 5
    for m in (model, loaded):
        fit(m, range(5, 9))
        assert_same_everywhere(weights_of(m))
    assert_close(weights_of(loaded), weights_of(model), 1e-4, 1e-5)


def decay_takes_no_part_in_momentum() -> None:
    """Where there is no gradient weights fade, and do nothing else."""
    x = tf.Variable(np.ones((16, 16), np.float32))
    optimizer = _optimizer(weight_decay=0.5)
    optimizer.apply([tf.zeros((16, 16))], [x])
    np.testing.assert_allclose(x.numpy(), 1 - 0.003 * 0.5, rtol=1e-6)


def local_variables_are_refused() -> None:
    x = tf.Variable(np.ones(40))
    optimizer = _optimizer()
    optimizer.register_local_var(x)
    with raises(ConfigError, "takes no step", "local variables"):
        optimizer.apply([tf.ones(40, tf.float64)], [x])


def what_would_change_signs_is_refused() -> None:
    """Clipped to a norm of 1, the signs of n weights would be 1 / sqrt(n)."""
    x = tf.Variable(np.ones(40, np.float32))
    for option in ("clipnorm", "clipvalue", "global_clipnorm", "loss_scale_factor"):
        with raises(ConfigError, f"{option}=2.0", "no gradients: drop it"):
            _optimizer(**{option: 2.0}).build([x])
    adam = hvd_keras.OneBitAdam(clipnorm=2.0)
    with raises(ConfigError, "clipnorm=2.0"):
        hvd_keras.DistributedOptimizer(adam, compression=adam.compressor()).build([x])


def bad_options_are_errors() -> None:
    for name, value in (("decay", -0.1), ("chunk", 2.0), ("top_k", 0), ("sign", None)):
        with raises(ConfigError, name):
            hvd_keras.DeMo(**{name: value})
    with raises(ConfigError, "demo hands out momenta"):
        hvd_keras.DistributedOptimizer(keras.optimizers.Adam(), compression="demo")
