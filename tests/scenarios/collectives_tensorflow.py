"""Gradients that pass through collectives in TensorFlow: beside what all frameworks share."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvd_compress.errors import UnsupportedError
from tests.scenarios.driver import gradients_through, raises
from tests.scenarios.driver_tensorflow import hvd, traced


def groups_methods_and_rows() -> None:
    total, weight = hvd.size() * (hvd.size() + 1) / 2, hvd.rank() + np.float32(1)
    first = np.float32(hvd.rank() == 0)
    for function, x, expected in (
        (lambda x: tf.stack(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), [1.0, 2.0], 3 * total),
        (lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.FP16), [1.0, 2.0], total),
        (
            lambda x: hvd.allreduce(x, op=hvd.Average, compression=hvd.NoCompression()),
            *([1.0, 2.0], total / hvd.size()),
        ),
        # What only looks some rows up has a sparse gradient.
        (
            lambda x: tf.gather(hvd.allgather(x), [0]),
            *(np.ones((1, 2), "f4"), total / hvd.size() * first),
        ),
    ):
        for found in gradients_through(function, x, weight):
            np.testing.assert_allclose(found, np.full(np.shape(x), expected), rtol=1e-6)


def a_graph_called_under_a_tape_has_gradients_too() -> None:
    x = tf.constant([hvd.rank() + 1.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = traced(lambda x: hvd.allreduce(x, op=hvd.Sum))(x)
    np.testing.assert_allclose(tape.gradient(loss, x), [hvd.size()])


def a_method_that_sends_less_than_all_has_no_gradient() -> None:
    def loss(x: tf.Tensor) -> tf.Tensor:
        method = hvd.TopK(density=0.5, error_feedback=False)
        return hvd.allreduce(x, op=hvd.Sum, compression=method)

    np.testing.assert_array_equal(loss(tf.constant([1.0, 2.0])), [0.0, 2.0 * hvd.size()])
    with raises(UnsupportedError, "topk", "stop_gradient"):
        gradients_through(loss, [1.0, 2.0], 1.0)
