"""Horovod under TensorFlow: when a graph runs, a collective starts as soon as its input is
there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.tensorflow import allreduce, mpi_ops  # Horovod's own, not yet wrapped

from hvd_compress.agreement import digest, encode
from hvd_compress.engines.base import Engine
from hvd_compress.engines.local import LocalEngine
from hvd_compress.engines.named import NamedEngine, Op
from hvd_compress.integrations.horovod import bind_call

from .runtime import Common, GraphEngine, Runtime

#: by so many the numbers that ranks compare are filled up: a step of a model has 20
_NUMBERS = 32
_OPS = {"sum": mpi_ops.Sum, "max": mpi_ops.Max}


class HorovodGraphEngine(GraphEngine):
    """Collectives become nodes of the graph, named after the bucket.

    Args:
        prefix: returns how their names begin; or a text, for which engines are numbered.
    """

    keeps_replies = True

    def __init__(
        self,
        process_set: Any,
        predivide: float,
        prefix: str | Callable[[], str],
        agreed: tf.Tensor | None = None,
    ) -> None:
        super().__init__(process_set, predivide, agreed)
        self._prefix = prefix

    @property
    def prefix(self) -> str:  # type: ignore[override]
        found = self._prefix
        return self._numbered(found) if isinstance(found, str) else found()

    def _launch(self, op: Op) -> Any:
        tensor = _opaque(op.tensor, self._agreed)
        # Horovod would take what stands before a slash for a scope, and drop it.
        name = re.sub(r"[^\w.-]", ".", op.name)
        common: dict[str, Any] = {"name": name, "ignore_name_scope": True, "process_set": self._set}
        if op.splits is not None:
            return mpi_ops.alltoall(tensor, op.splits, **common)
        if op.kind in _OPS:
            return allreduce(tensor, op=_OPS[op.kind], **common)
        if op.kind == "broadcast":
            return mpi_ops.broadcast(tensor, self._global_rank(op.root), **common)
        return mpi_ops.allgather(tensor, **common)

    def _with_replies(self, result: Any, replies: list[Any]) -> Any:
        """Return ``result`` such that the graph reads all replies.  A graph leaves out collectives
        whose replies are not read, and other ranks would wait for them.

        Control dependencies alone do not help: the graph's optimizer takes an operation without
        further inputs for one that does nothing.  It leaves assertions alone, and so this
        one reads an element of each reply.
        """
        read = [tf.reshape(tf.nest.flatten(x)[0], [-1])[:1] for x in replies]
        if not read or tf.executing_eagerly():
            return result
        with tf.device("CPU:0"):
            all_there = tf.raw_ops.Assert(condition=True, data=read)
        with tf.control_dependencies([all_there]):
            return _identity(result)

    def _sum_bfloat16(self, op: Op) -> Generator[Op, Any, tf.Tensor]:
        """Sum a bfloat16 array.  Horovod cannot add these, but it can carry their bits: every rank
        adds one part, in float32, and gives the rounded sum to all.  This sends as many bytes as a
        ring."""
        array, name = op.tensor, op.name
        n, size = array.shape[0], self.size
        each = -(-n // size)
        bits = tf.bitcast(tf.pad(array, [[0, each * size - n]]), tf.int16)
        splits = self._splits([each] * size)
        mine, _ = yield Op("alltoall", f"{name}.scatter", bits, splits)
        rows = tf.bitcast(tf.reshape(mine, [size, each]), tf.bfloat16)
        summed = tf.reduce_sum(tf.cast(rows, tf.float32), 0)
        bits = tf.bitcast(tf.cast(summed, tf.bfloat16), tf.int16)
        total = yield Op("gather_equal", f"{name}.gather", bits)
        return tf.bitcast(total, tf.bfloat16)[:n]


def _identity(result: Any) -> Any:
    """Return what the exchange of a bucket returned, with directions that are nodes of their own:
    of each plan in it, and outcomes by name."""
    if isinstance(result, list):
        return [_identity(part) for part in result]
    if isinstance(result, tuple):
        plan, averages, record = result
        directions = [tf.identity(x) for x in averages.directions]
        return plan, averages._replace(directions=directions), record
    found = {}
    for name, outcome in result.items():
        key = "mean" if outcome.update is None else "update"
        found[name] = outcome._replace(**{key: tf.identity(outcome.direction)})
    return found


def _opaque(x: tf.Tensor, agreed: tf.Tensor | None) -> tf.Tensor:
    """Return ``x`` as soon as ``agreed`` is true, such that a graph's optimizer cannot say what it
    is.

    The optimizer takes collectives for functions of their input.  If that is constant, it runs them
    while it optimizes, when other ranks do not.  It also merges two with one input, though Horovod
    tells them apart by their names.
    """
    if tf.executing_eagerly():
        return x
    with tf.device("CPU:0"):
        # A random number from 0 to 0.  A reshape would not do: it is known not to change values.
        zero = tf.raw_ops.RandomUniformInt(
            shape=tf.constant([1]), minval=0, maxval=1, seed=1, seed2=1
        )
        if agreed is not None:  # branches keep inputs that are data, and lose others
            zero -= tf.cast(tf.logical_not(agreed), tf.int32)
    same = tf.slice(x, zero, [-1])
    same.set_shape(x.shape)
    return same


class EagerEngine(HorovodGraphEngine):
    """Collectives of NumPy arrays, each of which waits for the other ranks."""

    keeps_replies = False

    def _launch(self, op: Op) -> Any:
        found = super()._launch(op._replace(tensor=tf.convert_to_tensor(op.tensor)))
        return tuple(x.numpy() for x in found) if isinstance(found, tuple | list) else found.numpy()

    _split = NamedEngine._split

    def _splits(self, sizes: Sequence[int]) -> np.ndarray:
        return np.array(sizes, np.int32)

    def _sum_bfloat16(self, op: Op) -> Any:
        bits = yield from super()._sum_bfloat16(op._replace(tensor=tf.convert_to_tensor(op.tensor)))
        return bits.numpy()


class HorovodRuntime:
    hvd = hvd
    has_plain = True

    def arguments(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        return bind_call(signature, args, kwargs, hvd, gather_bytes).arguments

    def engine(
        self,
        process_set: Any,
        predivide: float,
        prefix: Callable[[], str],
        agreed: tf.Tensor | None,
    ) -> Engine:
        return HorovodGraphEngine(process_set, predivide, prefix, agreed)

    def eager_engine(self, process_set: Any, prefix: str, arrays: type) -> Engine:
        chosen = hvd.global_process_set if process_set is None else process_set
        if not chosen.included() or chosen.size() == 1:
            return LocalEngine()
        kind = EagerEngine if arrays is np.ndarray else HorovodGraphEngine
        return kind(chosen, 1.0, prefix)

    def agreement(self, common: Common, prefix: str, process_set: Any) -> tf.Tensor:
        values = [number.value for number in common.numbers.values()]
        bits = [tf.bitcast(x, tf.int64) if x.dtype == tf.float64 else x for x in values]
        text = tf.constant(digest(encode(common.terms)), tf.int64)
        found = [tf.reshape(x, [-1]) for x in (text, *bits)]
        # As many on ranks that differ in which numbers they have.
        filled = tf.zeros([-sum(x.shape[0] for x in found) % _NUMBERS], tf.int64)
        own = tf.concat([*found, filled], 0)
        # The largest of each and the smallest: both are this rank's only if all are.
        mine = tf.concat([own, -own], 0)
        options = {"name": f"{prefix}.agreement", "process_set": process_set}

        def largest(mine: tf.Tensor) -> tf.Tensor:
            return allreduce(mine, op=mpi_ops.Max, ignore_name_scope=True, **options)

        def compare(*known: tf.Tensor) -> tf.Tensor:
            engine = HorovodGraphEngine(process_set, 1.0, lambda: f"{prefix}.terms")
            engine.agree(common.known(x.numpy() for x in known), tf.zeros([0]))
            engine.finish()
            return tf.constant(True)

        if tf.executing_eagerly():
            # In a graph, since names are lost elsewhere.  Errors keep their type.
            most = tf.function(largest, autograph=False)(mine)
            return tf.constant(True) if tf.reduce_all(most == mine) else compare(*values)
        return tf.cond(
            tf.reduce_all(largest(mine) == mine),
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
