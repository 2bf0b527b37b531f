"""Sparse gradients (``tf.IndexedSlices``): rows are sent whole, without loss, or with their values
in half precision (``Compressor.rows_wire``).

Duplicate rows are merged before they are sent, and frames hold raw bytes, so any dtype is possible.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvd_compress.base import Context, Exchange, Gather, Outcome
from hvd_compress.wire.rows import decode_rows, encode_rows

from . import backend


def merged(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return every row once, in ascending order; indices as int64."""
    indices, places = tf.unique(tf.cast(gradient.indices, tf.int64))
    order = tf.argsort(indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(indices))
    return tf.IndexedSlices(
        tf.gather(values, order), tf.gather(indices, order), gradient.dense_shape
    )


def exchange_rows(
    gradient: tf.IndexedSlices, shape: tf.TensorShape, context: Context, wire: str | None = None
) -> Exchange:
    """Average the rows that all ranks have; the outcome's ``mean`` has every row once.

    Args:
        shape: of the variable.
        wire: the dtype in which values are sent, if that is narrower; sums are made in the
            gradient's.
    """
    own, n, dtype = merged(gradient), shape[0], gradient.values.dtype
    narrow = tf.as_dtype(wire) if wire is not None and dtype.size > 2 else dtype
    row = shape[1:].num_elements() * narrow.size
    values_sent = tf.cast(own.values, narrow)

    def encode(places: np.ndarray, theirs: np.ndarray) -> list[np.ndarray]:
        return [encode_rows(places, theirs, n)]

    raw = tf.reshape(tf.bitcast(values_sent, tf.uint8), [-1])
    (frame,) = backend.on_host(encode, [own.indices, raw], [("uint8", None)], raw)
    indices, values = [], []
    for rank, part in enumerate((yield Gather(frame))):

        def decode(message: np.ndarray, sender: str = f"rank {rank}") -> list[np.ndarray]:
            return list(decode_rows(message, n, row, sender=sender))

        places, theirs = backend.on_host(decode, [part], [("int64", None), ("uint8", None)], raw)
        indices.append(places)
        each = tf.cast(tf.bitcast(tf.reshape(theirs, [-1, narrow.size]), narrow), dtype)
        values.append(tf.reshape(each, [-1, *shape[1:]]))
    total = merged(
        tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), gradient.dense_shape)
    )
    mean = tf.IndexedSlices(total.values / context.size, total.indices, gradient.dense_shape)
    return Outcome(mean, tf.cast(values_sent, dtype), {})
