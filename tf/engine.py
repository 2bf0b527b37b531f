"""Horovod under TensorFlow: exchanges are traced into a graph.

Requests become nodes named after the variable, and replies are symbols.  Nothing waits while a
graph is traced; when it runs, a collective starts as soon as its input is there.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvd_compress.base import Outcome
from hvd_compress.engines.base import LENGTH
from hvd_compress.engines.named import Op, ProcessSetEngine

_OPS = {"sum": mpi_ops.Sum, "max": mpi_ops.Max}


class HorovodEngine(ProcessSetEngine):
    """Collectives become nodes of the graph."""

    keeps_results = True

    def _launch(self, kind: str, ops: Sequence[Op]) -> list[Any]:
        tensors = [_opaque(op.tensor) for op in ops]
        # Horovod would take what stands before a slash for a scope, and drop it.
        name = re.sub(r"[^\w.-]", ".", ops[0].name)
        common: dict[str, Any] = {"name": name, "ignore_name_scope": True, "process_set": self._set}
        if kind in ("alltoall", "swap"):
            return [mpi_ops.alltoall(tensors[0], ops[0].splits, **common)]
        if kind in _OPS:
            common |= {"op": _OPS[kind], **(self._scales if kind == "sum" else {})}
            if len(tensors) > 1:
                return list(mpi_ops._grouped_allreduce(tensors, **common))
            return [mpi_ops._allreduce(tensors[0], **common)]
        if len(tensors) > 1:
            return list(mpi_ops.grouped_allgather(tensors, **common))
        return [mpi_ops.allgather(tensors[0], **common)]

    def _wait(self, handle: list[Any], count: int) -> list[Any]:
        return handle

    def _outcome(self, outcome: Outcome, results: list[Any]) -> Outcome:
        """A graph leaves out what nobody reads, and other ranks would wait for it.

        Control dependencies alone do not help: the graph's optimizer takes an operation that has
        nothing else behind it for one that does nothing.  It leaves assertions alone, and so this
        one reads an element of each result.
        """
        read = [tf.reshape(tf.nest.flatten(x)[0], [-1])[:1] for x in results if x is not None]
        if not read or tf.executing_eagerly():
            return outcome
        with tf.device("CPU:0"):
            all_there = tf.raw_ops.Assert(condition=True, data=read)
        with tf.control_dependencies([all_there]):
            update = None if outcome.update is None else tf.identity(outcome.update)
            return outcome._replace(mean=tf.identity(outcome.mean), update=update)

    def _split(self, own: tf.Tensor, everything: tf.Tensor) -> list[tf.Tensor]:
        each = own.shape[0]
        check = tf.debugging.assert_equal(
            tf.size(everything),
            each * self.size,
            message="PayloadError: the ranks' payloads differ in size: do all run the same "
            "version with the same compression options?",
        )
        with tf.control_dependencies([] if check is None else [check]):
            rows = tf.reshape(everything, [self.size, each])
        return tf.unstack(rows)

    def _splits(self, sizes: Sequence[int]) -> tf.Tensor:
        return tf.constant(sizes, tf.int32)

    def _with_length(self, payload: tf.Tensor) -> tf.Tensor:
        length = tf.bitcast(tf.size(payload, tf.int64)[None], tf.uint8)
        return tf.concat([tf.reshape(length, [-1]), payload], 0)

    def _split_by_length(self, everything: tf.Tensor) -> list[tf.Tensor]:
        parts, start = [], tf.constant(0, tf.int64)
        total = tf.size(everything, tf.int64)
        for rank in range(self.size):
            length = tf.bitcast(everything[start : start + LENGTH], tf.int64)
            start += LENGTH
            check = tf.debugging.Assert(
                (length >= 0) & (length <= total - start),
                [
                    f"PayloadError: the message of rank {rank} starts with a length that cannot "
                    "be: it was damaged, or a gradient is sparse on some ranks and dense on "
                    "others; pass sparse_as_dense=True then"
                ],
            )
            with tf.control_dependencies([] if check is None else [check]):
                parts.append(everything[start : start + length])
            start += length
        return parts

    def _sum_bfloat16(self, array: tf.Tensor, name: str) -> Generator[Op, Any, tf.Tensor]:
        """Horovod cannot add bfloat16, but it can carry its bits: every rank adds one part, in
        float32, and gives the rounded sum to all.  Moves as many bytes as a ring."""
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


def _opaque(x: tf.Tensor) -> tf.Tensor:
    """``x``, of which a graph's optimizer cannot say what it is.

    The optimizer takes collectives for functions of their input.  If that is constant, it runs them
    while it optimizes, when other ranks do not; and of two with one input it makes one, though
    Horovod tells them apart by their names.
    """
    if tf.executing_eagerly():
        return x
    with tf.device("CPU:0"):
        # A random number from 0 to 0.  A reshape would not do: it is known not to change values.
        zero = tf.raw_ops.RandomUniformInt(
            shape=tf.constant([1]), minval=0, maxval=1, seed=1, seed2=1
        )
    same = tf.slice(x, zero, [-1])
    same.set_shape(x.shape)
    return same
