"""MPI under TensorFlow: exchanges are traced into a graph, and each request is a node that waits
for the other ranks.

Nodes call :class:`hvd_compress.mpi.MpiEngine`, so requests are carried out as in NumPy, and sums
are added in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.engines.base import Engine
from hvd_compress.mpi.process_sets import ProcessSet
from hvd_compress.requests import Collective, Dense

from ..runtime import Common, Runtime
from . import collectives
from .nodes import node


class MpiGraphEngine(Engine):
    """Requests become nodes of the graph, one for each request of a bucket.

    The graph has compared the ranks, and cannot wait while it is traced.

    Args:
        process_set: the ranks; this one is among them.
        predivide: arrays are divided by it before they are added, and sums multiplied by it.
        agreed: a scalar that is true as soon as requests may be carried out; ``None``: at once.
    """

    def __init__(
        self, process_set: ProcessSet, predivide: float = 1.0, agreed: tf.Tensor | None = None
    ) -> None:
        self._set, self._predivide = process_set, predivide
        # As data: branches of a graph drop dependencies of other kinds.
        self._agreed = [] if agreed is None else [agreed]
        self._under_way: dict[str, Generator[Any, Any, Any]] = {}
        self._replies: dict[str, Any] = {}
        self._results: dict[str, Any] = {}

    @property
    def rank(self) -> int:
        return self._set.rank()

    @property
    def size(self) -> int:
        return self._set.size()

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        self._under_way[name] = exchange
        self._advance(name)

    def finish(self) -> dict[str, Any]:
        while self._under_way:  # a round of each in turn: one is compressed while another is sent
            for name in list(self._under_way):
                self._advance(name)
        results, self._results = self._results, {}
        return results

    def abandon(self) -> None:
        left, self._under_way, self._replies, self._results = self._under_way, {}, {}, {}
        for exchange in left.values():
            exchange.close()

    def _advance(self, name: str) -> None:
        try:
            request = self._under_way[name].send(self._replies.pop(name, None))
        except StopIteration as stop:
            del self._under_way[name]
            self._results[name] = stop.value
        else:
            self._replies[name] = self._carry(request)

    def _carry(self, request: Collective) -> Any:
        if not isinstance(request, Dense):
            return self._node(request)
        array = request.array
        if array.shape.num_elements() == 0:
            return array
        if array.dtype != tf.bfloat16:
            return self._node(request)
        if request.reckons:  # NumPy cannot add it
            wide = request.widened(tf.cast(array, tf.float32))
            return tf.cast(self._node(wide), tf.bfloat16)
        bits = request.carrying([tf.bitcast(array, tf.int16)])
        return tf.bitcast(self._node(bits), tf.bfloat16)

    def _node(self, request: Collective) -> Any:
        inputs, outputs = list(request.arrays), request.outputs(self.rank, self.size)
        forms = outputs if isinstance(outputs, list) else [outputs]

        def carry_out(*arrays: np.ndarray) -> Sequence[np.ndarray]:
            # The memory of a tensor is not ours to write to.
            reply = self._wait_for(request.carrying(arrays[: len(inputs)]))
            return reply if isinstance(outputs, list) else [reply]

        replies = node(carry_out, [*inputs, *self._agreed], forms)
        return replies if isinstance(outputs, list) else replies[0]

    def _wait_for(self, request: Collective) -> Any:
        engine = self._set.engine
        engine.predivide = self._predivide
        try:
            engine.start("request", _only(request))
            return engine.finish()["request"]
        except BaseException:
            engine.abandon()
            raise


def _only(request: Collective) -> Generator[Collective, Any, Any]:
    return (yield request)


class MpiRuntime:
    """See :class:`hvd_compress.tensorflow.runtime.Runtime`."""

    hvd = collectives

    def engine(
        self, process_set: ProcessSet, predivide: float, prefix: str, agreed: tf.Tensor | None
    ) -> Engine:
        return MpiGraphEngine(process_set, predivide, agreed)

    def agreement(self, common: Common, name: str, process_set: ProcessSet) -> tf.Tensor:
        def compare(*values: np.ndarray) -> list[np.bool_]:
            process_set.engine.agree(common.known(values), np.empty(0))
            process_set.engine.finish()
            return [np.bool_(True)]

        values = [number.value for number in common.numbers.values()]
        (agreed,) = node(compare, values, [("bool", ())])
        return agreed


runtime: Runtime = MpiRuntime()
