"""MPI under TensorFlow: exchanges are traced into a graph, and each request is a node that waits
for the other ranks.

Nodes call :class:`hvd_compress.mpi.MpiEngine`, so requests are carried out as in NumPy, and sums
are added in the order of the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.engines.base import Engine, asking
from hvd_compress.integrations.environment import chosen
from hvd_compress.integrations.mpi import Compression
from hvd_compress.mpi.process_sets import ProcessSet, engine_over, rank
from hvd_compress.requests import Collective, Dense

from ..runtime import Common, GraphEngine, Runtime
from . import collectives
from .nodes import node


class MpiGraphEngine(GraphEngine):
    """Requests become nodes of the graph, one for each request of a bucket."""

    sums_in_rank_order = True

    def _ops(self, name: str, exchange: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Return the exchange: MPI carries requests out as they are."""
        return exchange

    def _launch(self, request: Any) -> Any:
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

        # As data: branches of a graph drop dependencies of other kinds.
        agreed = [] if self._agreed is None else [self._agreed]
        replies = node(carry_out, [*inputs, *agreed], forms)
        return replies if isinstance(outputs, list) else replies[0]

    def _wait_for(self, request: Collective) -> Any:
        engine = self._set.engine
        engine.predivide = self._predivide
        try:
            return engine.run("request", asking(request))
        except BaseException:
            engine.abandon()
            raise


class MpiRuntime:
    hvd = collectives
    has_plain = False

    def arguments(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        rank()  # says if init() is missing
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        compression = chosen(call.arguments["compression"], Compression.none, rank)
        return call.arguments | {"compression": compression}

    def engine(
        self,
        process_set: ProcessSet,
        predivide: float,
        prefix: Callable[[], str],
        agreed: tf.Tensor | None,
    ) -> Engine:
        return MpiGraphEngine(process_set, predivide, agreed)

    def eager_engine(self, process_set: ProcessSet | None, prefix: str, arrays: type) -> Engine:
        return engine_over(process_set)

    def agreement(self, common: Common, prefix: str, process_set: ProcessSet) -> tf.Tensor:
        def compare(*values: np.ndarray) -> list[np.bool_]:
            process_set.engine.agree(common.known(values), np.empty(0))
            process_set.engine.finish()
            return [np.bool_(True)]

        values = [number.value for number in common.numbers.values()]
        (agreed,) = node(compare, values, [("bool", ())])
        return agreed


runtime: Runtime = MpiRuntime()
