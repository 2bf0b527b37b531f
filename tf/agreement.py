"""Whether all ranks are about to do the same, asked over Horovod by a graph at the beginning of
every step; see :meth:`.runtime.Runtime.agreement`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from horovod.tensorflow import Max, allgather, allreduce  # Horovod's own, before it is wrapped

from hvd_compress.agreement import check, digest, encode
from hvd_compress.wire.content import decode_end_to_end, encode_bytes

from .runtime import Common

_TERMS = "terms of a step"


def agreement(common: Common, name: str, process_set: Any) -> tf.Tensor:
    """Return a tensor that is there only after all ranks are known to agree."""
    values = [number.value for number in common.numbers.values()]
    bits = [tf.bitcast(x, tf.int64) if x.dtype == tf.float64 else x for x in values]
    text = tf.constant(digest(encode(common.terms)), tf.int64)
    own = tf.concat([tf.reshape(x, [-1]) for x in (text, *bits)], 0)
    # The largest of each and the smallest: both are this rank's only if all are.
    mine = tf.concat([own, -own], 0)
    most = allreduce(mine, op=Max, name=name, ignore_name_scope=True, process_set=process_set)

    def compare(*known: tf.Tensor) -> tf.Tensor:
        own = encode(common.known(x.numpy() for x in known))
        frame = tf.constant(encode_bytes(own, _TERMS))
        frames = allgather(frame, name="hvd_compress.terms", process_set=process_set)
        check(decode_end_to_end(frames.numpy(), _TERMS))
        return tf.constant(True)

    return tf.cond(
        tf.reduce_all(most == mine),
        lambda: tf.constant(True),
        lambda: tf.py_function(compare, values, tf.bool),
    )
