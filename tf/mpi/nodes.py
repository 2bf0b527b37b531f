"""Python functions as nodes of a graph, which all ranks run in the same order."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


@functools.cache
def _turn() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="hvd_compress.turn")


#: by graph, what its next node waits for
_latest: weakref.WeakKeyDictionary[Any, tf.Operation] = weakref.WeakKeyDictionary()


def node(
    function: Callable[..., Sequence[Any]],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tuple[str, Any]],
) -> list[tf.Tensor]:
    """Return what a function makes of arrays: now, or when the graph runs.

    A function that waits for other ranks must run on all of them, in the same order.  So its node
    counts on in a variable: a graph leaves out nothing that writes to a variable.  It runs the
    reads and writes of one in the order in which they were traced, branches included.  A graph of
    gradients does not, so each node also waits for the one before.

    Args:
        function: of NumPy arrays, which it leaves as they are.
        outputs: dtype of each of its results, and its shape, or length if it is flat; ``None``:
            nobody knows.
    """
    if tf.executing_eagerly():  # errors keep their type
        found = function(*(x.numpy() for x in inputs))
        return [tf.convert_to_tensor(x) for x in found]

    def run(turn: np.ndarray, *arrays: np.ndarray) -> list[Any]:
        return [turn + 1, *function(*arrays)]

    graph = tf.compat.v1.get_default_graph()
    with (
        tf.device("CPU:0"),
        tf.control_dependencies([op for op in [_latest.get(graph)] if op is not None]),
    ):
        dtypes = [tf.int64, *(tf.as_dtype(dtype) for dtype, _ in outputs)]
        turn, *results = tf.numpy_function(run, [_turn().read_value(), *inputs], dtypes)
        _turn().assign(turn, read_value=False)
    _latest[graph] = turn.op
    for result, (_, length) in zip(results, outputs, strict=True):
        result.set_shape(length if isinstance(length, tuple | tf.TensorShape) else [length])
    return results
