"""1-bit LAMB in Keras: what is saved, unknown and refused."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf

import hvd_compress.tensorflow as hvd
import hvd_compress.tensorflow.keras as hvd_keras
from hvd_compress.errors import ConfigError
from tests.scenarios.adam_keras import LOSS, fit, weights_of
from tests.scenarios.driver import assert_close, assert_same_everywhere, barrier, raises
from tests.scenarios.driver_tensorflow import model_of

FREEZE = 4


def models_are_saved_and_go_on() -> None:
    for steps in (2, 7):
        lamb = hvd_keras.OneBitLAMB(
            0.01, freeze_step=FREEZE, weight_decay=0.01, factor_range=(0.25, 2.0)
        )
        model = model_of("mlp")
        model.compile(
            hvd_keras.DistributedOptimizer(lamb, compression=lamb.compressor(min_size=0)), loss=LOSS
        )
        fit(model, range(steps))
        model.optimizer.compression.consolidate()
        folder = Path(hvd.broadcast_object(tempfile.mkdtemp(), root_rank=0, name="folder"))
        if hvd.rank() == 0:
            model.save(folder / "model.keras")
        barrier()
        method = model.optimizer.compression.method
        loaded = hvd_keras.load_model(folder / "model.keras", compression=method)
        assert loaded.optimizer.get_config() == model.optimizer.get_config()
        assert list(loaded.optimizer.factor_range) == [0.25, 2.0]
        for kind, ours in model.optimizer.slots.items():
            theirs = loaded.optimizer.slots[kind]
            assert all(map(np.array_equal, map(np.asarray, ours), map(np.asarray, theirs)))
            assert all(np.any(np.asarray(x)) for x in theirs)
        for m in (model, loaded):
            fit(m, range(steps, steps + 5))
            assert_same_everywhere(weights_of(m))
        assert_close(weights_of(loaded), weights_of(model), 1e-4, 1e-5)


def what_cannot_be_stays_finite() -> None:
    """Variables that are empty, or zero, or never had a gradient before the freeze."""
    variables = [tf.Variable(tf.zeros([n])) for n in (0, 5, 5)]
    lamb = hvd_keras.OneBitLAMB(0.1, freeze_step=2, weight_decay=0.1)
    for step in range(4):
        factors = (1.0, 1.0, float(step > 1))
        pairs = zip(variables, factors, strict=True)
        lamb.apply([factor * tf.ones_like(v) for v, factor in pairs], variables)
    assert all(np.isfinite(v.numpy()).all() for v in variables)
    assert (variables[1].numpy() < 0).all()
    assert (variables[2].numpy() == 0).all()


def biases_may_be_left_out_of_decay() -> None:
    """Without gradients, only what decays moves: by learning rate times coefficient."""
    kernel, bias = (tf.Variable(tf.ones([4]), name=name) for name in ("kernel", "bias"))
    lamb = hvd_keras.OneBitLAMB(0.25, weight_decay=0.5)
    lamb.exclude_from_weight_decay(var_names=["bias"])
    lamb.apply([tf.zeros([4])] * 2, [kernel, bias])
    # u = 0.5 p, and the coefficient is |p| / |u| = 2
    np.testing.assert_allclose(kernel.numpy(), np.full(4, 0.75), rtol=1e-6)
    np.testing.assert_array_equal(bias.numpy(), np.ones(4))


def bad_options_are_errors() -> None:
    for name, value in (
        ("freeze_step", 0),
        ("coefficient_range", (0.0, 1.0)),
        ("factor_range", (2.0, 1.0)),
        ("coefficient_beta", 1.0),
        ("factor_threshold", 0.0),
        ("epsilon", -1.0),
    ):
        with raises(ConfigError, name):
            hvd_keras.OneBitLAMB(**{name: value})
