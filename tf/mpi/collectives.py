"""Horovod's functions on single tensors and objects, over MPI, eagerly and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress import mpi
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.methods import FP16, NoCompression
from hvd_compress.mpi.objects import allgather_object as allgather_object
from hvd_compress.mpi.objects import barrier as barrier
from hvd_compress.mpi.objects import broadcast_bytes, gather_bytes
from hvd_compress.mpi.objects import broadcast_object as broadcast_object
from hvd_compress.mpi.process_sets import ProcessSet, communicator_of, global_process_set
from hvd_compress.mpi.process_sets import rank as rank
from hvd_compress.mpi.process_sets import size as size

from ..binding import native
from .nodes import node

Average, Sum, Max, Adasum = "mean", "sum", "max", "adasum"


class Compression:
    """Horovod's names for the methods without state.

    They are instances, so that a script that says ``none`` can be told from one that names
    ``NoCompression``.

    >>> hvd.Compression.fp16
    FP16(algorithm=None, rows='float16')
    """

    none = NoCompression()
    fp16 = FP16()


def handle_average_backwards_compatibility(op: str | None, average: bool | None) -> str:
    """Return the operation that these options of Horovod's functions mean."""
    if not isinstance(average, bool | None):
        raise ConfigError(f"average={average!r}: True, False, or write op=; names go to name=")
    if op is None:
        op = Sum if average is False else Average
    if op not in (Average, Sum, Max):
        raise UnsupportedError(f"op={op!r}: over MPI there are hvd.Average, hvd.Sum and hvd.Max")
    return op


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the average, the sum or the maximum over the ranks.  No gradient passes through it.

    Args:
        tensor: of the same shape and dtype on all ranks; of ``tf.IndexedSlices`` the rows of all
            ranks are returned, one behind the other.
        average: older than ``op``: ``False`` means ``op=hvd.Sum``.
        device_dense, device_sparse: accepted as Horovod's; sums are made in host memory.
        compression: any method; those with a state need a ``name``.
        op: ``hvd.Average``, ``hvd.Sum`` or ``hvd.Max``.
        prescale_factor, postscale_factor: multiply before and after.
        name: of the tensor.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the ranks' tensors or options differ; inside of an error of TensorFlow if a
            graph is running.
        UnsupportedError: another ``op``, or a dtype that cannot be added.
    """
    op, comm = handle_average_backwards_compatibility(op, average), communicator_of(process_set)
    if isinstance(tensor, tf.IndexedSlices):
        if op == Max:
            raise UnsupportedError("op=hvd.Max of tf.IndexedSlices: pass tf.convert_to_tensor(...)")
        factor = prescale_factor * postscale_factor / (comm.size if op == Average else 1)
        rows = allgather(tensor.values, name, process_set)
        indices = allgather(tensor.indices, name, process_set)
        return tf.IndexedSlices(rows * tf.cast(factor, rows.dtype), indices, tensor.dense_shape)
    x = tf.convert_to_tensor(tensor)
    if prescale_factor != 1:
        x = x * tf.cast(prescale_factor, x.dtype)

    def reduced(array: np.ndarray) -> list[np.ndarray]:
        return [mpi.allreduce(np.asarray(array), op=op, comm=comm)]

    total = _same_shape(reduced, x)
    return total * tf.cast(postscale_factor, x.dtype) if postscale_factor != 1 else total


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
) -> list[Any]:
    """Return :func:`allreduce` of each tensor; by a method they are exchanged together.

    Args:
        tensors: as many on all ranks, of the same shapes and dtypes.
        average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
            process_set, name: as for :func:`allreduce`.
    """
    options: dict[str, Any] = {
        "op": handle_average_backwards_compatibility(op, average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    return [allreduce(tensor, **options) for tensor in tensors]


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tf.Tensor:
    """Return all ranks' tensors, joined along the first dimension in rank order.

    Args:
        tensor: of the same dtype on all ranks, and of the same shape but for the first dimension.
        name: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the ranks' rows differ in dtype or shape.
    """
    x = tf.convert_to_tensor(tensor)

    def gathered(array: np.ndarray) -> list[np.ndarray]:
        kind = f"allgather of {array.dtype.name} rows of {list(array.shape[1:])}"
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = np.concatenate(gather_bytes(raw, kind, process_set))
        return [parts.view(array.dtype).reshape(-1, *array.shape[1:])]

    (rows,) = node(gathered, [x], [(x.dtype.name, (None, *x.shape[1:]))])
    return rows


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensor of ``root_rank``.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: whose is returned, among all ranks.
        name: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        ConfigError: the root is not one of them.
        MismatchError: the ranks' tensors differ in shape or dtype.
    """

    def sent(array: np.ndarray) -> list[np.ndarray]:
        own = np.array(array)
        what = f"{own.dtype.name}{list(own.shape)}"
        broadcast_bytes(own.reshape(-1).view(np.uint8), root_rank, what, process_set)
        return [own]

    return _same_shape(sent, tf.convert_to_tensor(tensor))


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Give all ranks the values that ``variables`` have on ``root_rank``, one by one as
    :func:`broadcast` does, with its ``process_set``; ``inplace`` is there for Horovod's callers."""
    for variable in map(native, variables):
        variable.assign(broadcast(variable, root_rank, process_set=process_set))


def _same_shape(function: Callable[..., Sequence[Any]], x: tf.Tensor) -> tf.Tensor:
    (found,) = node(function, [x], [(x.dtype.name, x.shape)])
    return found
