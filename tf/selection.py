"""The indices of the largest elements, in TensorFlow's own operations."""

from __future__ import annotations

import tensorflow as tf

# Below this size ranking everything is as fast as looking at a sample first.
_SMALL = 1 << 14
# From this part of the elements on, counting digits is faster than a sample and its survivors.
_MANY = 1 / 16
# Digits of so many bits: two in a float32.
_DIGIT = 16


def top_k(x: tf.Tensor, k: int) -> tf.Tensor:
    n = x.shape.num_elements()
    if n <= _SMALL:
        return _by_ranking(x, k)
    if k >= _MANY * n:
        return _by_digits(x, k)
    # The threshold of a sample lets a few more than k elements pass, which are ranked exactly.
    stride = max(1, min(100, k // 16))
    stride -= stride % 2 == 0
    sample = x[::stride]
    expected = k * sample.shape[0] / n
    rank = min(sample.shape[0], int(expected + 3 * expected**0.5) + 2)
    threshold = tf.math.top_k(sample, rank, sorted=True).values[-1]
    survivors = tf.reshape(tf.where(x >= threshold), [-1])

    def among_survivors() -> tf.Tensor:
        return tf.gather(survivors, _by_ranking(tf.gather(x, survivors), k))

    return tf.cond(tf.size(survivors) >= k, among_survivors, lambda: _by_digits(x, k))


def _by_ranking(x: tf.Tensor, k: int) -> tf.Tensor:
    indices = tf.math.top_k(x, k, sorted=False).indices
    return tf.cast(tf.sort(tf.ensure_shape(indices, [k])), tf.int64)


def _by_digits(x: tf.Tensor, k: int) -> tf.Tensor:
    """Return what :func:`top_k` does, for numbers that are not negative, which are in the order of
    their bits taken as integers.  The k-th largest is found digit by digit, from counts:
    ``tf.math.top_k`` would rank k elements, which takes seconds where k is in the millions."""
    integers = tf.int64 if x.dtype == tf.float64 else tf.int32
    bits = tf.bitwise.bitwise_and(tf.bitcast(x, integers), integers.max)  # NaN may have a sign
    alike, rank, bins = bits, tf.constant(k, tf.int64), 1 << _DIGIT
    for shift in reversed(range(0, 8 * integers.size, _DIGIT)):
        digits = tf.bitwise.right_shift(alike, tf.constant(shift, integers))
        digits = tf.cast(tf.bitwise.bitwise_and(digits, bins - 1), tf.int32)
        counts = tf.math.bincount(digits, minlength=bins, maxlength=bins, dtype=tf.int64)
        reached = tf.cumsum(counts, reverse=True)
        digit = tf.math.count_nonzero(reached >= rank, dtype=tf.int32) - 1
        rank -= reached[digit] - counts[digit]
        alike = tf.boolean_mask(alike, digits == digit)
    # Of those that equal the k-th, the first ones.
    equal = bits == alike[0]
    last = tf.where(equal)[rank - 1, 0]
    chosen = (bits > alike[0]) | (equal & (tf.range(x.shape[0], dtype=tf.int64) <= last))
    return tf.ensure_shape(tf.reshape(tf.where(chosen), [-1]), [k])
