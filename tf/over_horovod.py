"""The bindings to TensorFlow over Horovod; see :class:`.runtime.Runtime`."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.engines.base import Engine

from .agreement import agreement
from .engine import HorovodEngine
from .runtime import Common, Runtime


class HorovodRuntime:
    hvd = hvd

    def engine(
        self, process_set: Any, predivide: float, prefix: str, agreed: tf.Tensor | None
    ) -> Engine:
        return HorovodEngine(process_set, predivide, prefix, agreed)

    def agreement(self, common: Common, name: str, process_set: Any) -> tf.Tensor:
        return agreement(common, name, process_set)


def gather_bytes(own: bytes, name: str, process_set: Any) -> bytes:
    """Return the bytes of all ranks, in their order, whether or not a graph is traced now."""
    with tf.init_scope(), tf.device("CPU:0"):
        if not tf.executing_eagerly():  # graphs of TensorFlow 1, which run later
            return own
        mine = tf.constant(list(own), tf.uint8)
        everyones = hvd.allgather(mine, name=name, process_set=process_set)
        return bytes(everyones.numpy().tolist())


runtime: Runtime = HorovodRuntime()
