"""The bindings to TensorFlow over Horovod; see :class:`.runtime.Runtime`."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import Max, allgather, allreduce  # Horovod's own, before it is wrapped

from hvd_compress.agreement import check, digest, encode
from hvd_compress.engines.base import Engine
from hvd_compress.wire.content import decode_end_to_end, encode_bytes

from .engine import HorovodEngine
from .runtime import Common, Runtime

_TERMS = "terms of a step"


class HorovodRuntime:
    hvd = hvd

    def engine(
        self, process_set: Any, predivide: float, prefix: str, agreed: tf.Tensor | None
    ) -> Engine:
        return HorovodEngine(process_set, predivide, prefix, agreed)

    def agreement(self, common: Common, name: str, process_set: Any) -> tf.Tensor:
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


def gather_bytes(own: bytes, name: str, process_set: Any) -> bytes:
    """Return the bytes of all ranks, in their order, whether or not a graph is traced now."""
    with tf.init_scope(), tf.device("CPU:0"):
        if not tf.executing_eagerly():  # graphs of TensorFlow 1, which run later
            return own
        mine = tf.constant(list(own), tf.uint8)
        everyones = hvd.allgather(mine, name=name, process_set=process_set)
        return bytes(everyones.numpy().tolist())


runtime: Runtime = HorovodRuntime()
