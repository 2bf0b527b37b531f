"""Gradients of some rows (``tf.IndexedSlices``): rows travel whole, without loss.

Duplicate rows are merged before they are sent, and payloads carry raw bytes, so any dtype travels.
"""

from __future__ import annotations

import tensorflow as tf

from hvd_compress.base import Context, Exchange, Gather, Outcome


def merged(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Every row once, in ascending order; indices as int64."""
    indices, places = tf.unique(tf.cast(gradient.indices, tf.int64))
    order = tf.argsort(indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(
        tf.gather(values, order), tf.gather(indices, order), gradient.dense_shape
    )


def exchange_rows(gradient: tf.IndexedSlices, shape: tf.TensorShape, context: Context) -> Exchange:
    """Average the rows that all ranks have; the outcome's ``mean`` has every row once.

    Args:
        shape: of the variable.
    """
    own = merged(gradient)
    parts = yield Gather(_bytes(own.indices))
    counts = [tf.size(part) // tf.int64.size for part in parts]
    indices = [tf.bitcast(tf.reshape(part, [-1, tf.int64.size]), tf.int64) for part in parts]
    row = shape[1:].num_elements()
    parts = yield Gather(_bytes(own.values))
    dtype = own.values.dtype
    values = []
    for rank, (part, count, index) in enumerate(zip(parts, counts, indices, strict=True)):
        fits = (tf.size(part) == count * row * dtype.size) & tf.reduce_all(
            (index >= 0) & (index < shape[0])
        )
        check = tf.debugging.Assert(
            fits, [f"PayloadError: rank {rank} sent rows that do not fit {shape}"]
        )
        with tf.control_dependencies([] if check is None else [check]):
            raw = tf.reshape(part, [-1, dtype.size])
        values.append(tf.reshape(tf.bitcast(raw, dtype), [count, *shape[1:]]))
    total = merged(
        tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), gradient.dense_shape)
    )
    mean = tf.IndexedSlices(total.values / context.size, total.indices, gradient.dense_shape)
    return Outcome(mean, own.values, {})


def _bytes(x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(x, tf.uint8), [-1])
