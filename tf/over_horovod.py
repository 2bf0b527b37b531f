"""The bindings to TensorFlow over Horovod; see :class:`.runtime.Runtime`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvd_compress.agreement import Terms
from hvd_compress.engines.base import Engine

from .agreement import agreement
from .engine import HorovodEngine
from .runtime import Runtime


class HorovodRuntime:
    hvd = hvd

    def engine(
        self, process_set: Any, predivide: float, prefix: str, agreed: tf.Tensor | None
    ) -> Engine:
        return HorovodEngine(process_set, predivide, prefix, agreed)

    def agreement(
        self, terms: Terms, counts: Mapping[str, tf.Tensor], name: str, process_set: Any
    ) -> tf.Tensor:
        return agreement(terms, counts, name, process_set)


runtime: Runtime = HorovodRuntime()
