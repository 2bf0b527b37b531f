"""MPI under TensorFlow: exchanges are traced into a graph, and each request is a node that waits
for the other ranks.

Nodes call :class:`hvd_compress.mpi.MpiEngine`, so requests are carried out as in NumPy, and sums
are added in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.agreement import Terms
from hvd_compress.backends import Output
from hvd_compress.base import (
    Alltoall,
    Array,
    Broadcast,
    Collective,
    Gather,
    Max,
    Neighbors,
    SparseSum,
    Sum,
)
from hvd_compress.engines.base import Engine
from hvd_compress.errors import UnsupportedError
from hvd_compress.mpi.process_sets import ProcessSet

from ..runtime import Runtime
from . import collectives
from .nodes import node


class MpiGraphEngine:
    """Requests become nodes of the graph, one for each request of a bucket.

    Args:
        process_set: the ranks; this one is among them.
        predivide: sums are scaled by 1 / predivide before and by predivide after adding.
        agreed: a scalar that is true as soon as requests may be carried out; ``None``: at once.
    """

    is_collective = False
    sums_in_rank_order = True

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

    def agree(self, terms: Terms, like: Any) -> None:
        """Do nothing, since the graph has compared everything."""

    def check_step(self, describe: Callable[[], list[str]], planned: bool, like: Array) -> None:
        """Do nothing, since a graph cannot wait while it is traced."""

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        self._under_way[name] = exchange
        self._advance(name)

    def poll(self) -> None:
        pass

    def finish(self) -> dict[str, Any]:
        while self._under_way:  # a round of each in turn: one is compressed while another is sent
            for name in list(self._under_way):
                self._advance(name)
        results, self._results = self._results, {}
        return results

    def abandon(self) -> None:
        self._under_way, self._replies, self._results = {}, {}, {}

    def _advance(self, name: str) -> None:
        try:
            request = self._under_way[name].send(self._replies.pop(name, None))
        except StopIteration as stop:
            del self._under_way[name]
            self._results[name] = stop.value
        else:
            self._replies[name] = self._carry(request)

    def _carry(self, request: Collective) -> Any:
        if isinstance(request, SparseSum):
            raise UnsupportedError(
                f"algorithm={request.algorithm!r} adds entries while they travel, and a graph "
                "would have to know beforehand how many come out: leave algorithm out"
            )
        if isinstance(request, Gather | Neighbors):
            n = request.payload.shape[0] if request.equal_sizes else None
            senders = len(request.sources) if isinstance(request, Neighbors) else self.size
            return self._node(request, [request.payload], [("uint8", n)] * senders)
        if isinstance(request, Alltoall):
            n = request.payloads[self.rank].shape[0] if request.equal_sizes else None
            return self._node(request, request.payloads, [("uint8", n)] * self.size)
        return self._dense(request)

    def _dense(self, request: Sum | Max | Broadcast) -> tf.Tensor:
        array = request.array
        if array.shape.num_elements() == 0:
            return array
        if array.dtype == tf.bfloat16:  # which NumPy cannot add
            if isinstance(request, Broadcast):
                bits = request._replace(array=tf.bitcast(array, tf.int16))
                return tf.bitcast(self._dense(bits), tf.bfloat16)
            wide: Any = request._replace(array=tf.cast(array, tf.float32))
            if isinstance(request, Sum):
                wide = wide._replace(wire=request.wire or "bfloat16")
            return tf.cast(self._dense(wide), tf.bfloat16)
        if isinstance(request, Sum):  # the memory of a tensor is not ours to write to
            request = request._replace(owned=False)
        (reply,) = self._node(request, [array], [(array.dtype.name, tuple(array.shape))])
        return reply

    def _node(
        self, request: Collective, inputs: Sequence[tf.Tensor], outputs: Sequence[Output]
    ) -> list[tf.Tensor]:
        (field,) = {"array", "payload", "payloads"} & set(request._fields)

        def carry_out(*arrays: np.ndarray) -> Sequence[np.ndarray]:
            own = list(arrays[: len(inputs)])
            fields: dict[str, Any] = {field: own if field == "payloads" else own[0]}
            reply = self._wait_for(request._replace(**fields))
            return reply if isinstance(reply, list) else [reply]

        return node(carry_out, [*inputs, *self._agreed], outputs)

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

    def agreement(
        self, terms: Terms, counts: Mapping[str, tf.Tensor], name: str, process_set: ProcessSet
    ) -> tf.Tensor:
        def compare(*values: np.ndarray) -> list[np.bool_]:
            now = {key: str(value) for key, value in zip(counts, values, strict=True)}
            process_set.engine.agree({**terms, **now}, np.empty(0))
            process_set.engine.finish()
            return [np.bool_(True)]

        (agreed,) = node(compare, list(counts.values()), [("bool", ())])
        return agreed


runtime: Runtime = MpiRuntime()
