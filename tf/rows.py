"""Sparse gradients (``tf.IndexedSlices``): rows are sent as the option ``rows`` of a method says;
see :mod:`hvd_compress.methods.rows`.

Duplicate rows are merged before they are sent, and frames hold raw bytes, so any dtype is possible
where nothing has to wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvd_compress.base import Context, Exchange, Outcome, State
from hvd_compress.methods.rows import Rows
from hvd_compress.methods.rows import exchange_rows as exchange


def on_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)


def merged(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return every row once, in ascending order; indices as int64."""
    indices, values = _merge(gradient.indices, gradient.values)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _merge(indices: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    own, places = tf.unique(tf.cast(indices, tf.int64))
    order = tf.argsort(own)
    total = tf.math.unsorted_segment_sum(values, places, tf.size(own))
    return tf.gather(own, order), tf.gather(total, order)


def exchange_rows(
    gradient: tf.IndexedSlices,
    shape: tf.TensorShape,
    context: Context,
    rows: Rows,
    residual: tf.Variable | None = None,
) -> Exchange:
    """Average the rows that all ranks have; the outcome's ``mean`` has every row once.

    Args:
        shape: of the variable.
        rows: what is sent.
        residual: of the whole matrix, flat, if ``rows.keeps_residual``.  Its changes are in the
            outcome's state, as ``IndexedSlices``.
    """
    own, width = merged(gradient), shape[1:].num_elements()
    average = functools.partial(exchange, rows, n=shape[0], context=context, merge=_merge)
    values = tf.reshape(own.values, [tf.size(own.indices), width])
    if residual is None:
        found = yield from average(own.indices, values, waiting=None)
        state: State = {}
    else:
        # The variable is read and written where rows were touched, and nowhere else.
        places = own.indices[:, None] * width + tf.range(width, dtype=tf.int64)
        waiting = tf.gather(residual, places)
        found = yield from average(own.indices, values, waiting=waiting)
        left = tf.reshape(found.left, [-1])
        state = {"residual": tf.IndexedSlices(left, tf.reshape(places, [-1]))}
    mean = tf.reshape(found.values, [tf.size(found.indices), *shape[1:]])
    return Outcome(tf.IndexedSlices(mean, found.indices, gradient.dense_shape), found.sent, state)
