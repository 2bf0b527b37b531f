"""Whether all ranks are about to do the same, asked over Horovod by a graph at the beginning of
every step; see :meth:`.runtime.Runtime.agreement`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from horovod.tensorflow import allgather_object, mpi_ops

from hvd_compress.agreement import Terms, differences, digest, encode
from hvd_compress.errors import MismatchError


def agreement(
    terms: Terms, counts: Mapping[str, tf.Tensor], name: str, process_set: Any
) -> tf.Tensor:
    """Return a tensor that is there only after all ranks are known to agree."""
    text = digest(encode(terms))
    bits = [tf.bitcast(x, tf.int64) if x.dtype == tf.float64 else x for x in counts.values()]
    own = tf.stack([tf.constant(text, tf.int64), *bits])
    # The largest of each and the smallest: both are this rank's only if all are.
    mine = tf.concat([own, -own], 0)
    most = mpi_ops._allreduce(
        mine, op=mpi_ops.Max, name=name, ignore_name_scope=True, process_set=process_set
    )

    def fail(*values: tf.Tensor) -> tf.Tensor:
        now = {key: str(value.numpy()) for key, value in zip(counts, values, strict=True)}
        everyone = allgather_object(encode({**terms, **now}), process_set=process_set)
        raise MismatchError(differences(everyone))

    return tf.cond(
        tf.reduce_all(most == mine),
        lambda: tf.constant(True),
        lambda: tf.py_function(fail, list(counts.values()), tf.bool),
    )
