"""Horovod's functions on single tensors and objects, over MPI, eagerly and in graphs.

``allreduce``, ``allgather`` and ``broadcast`` pass gradients as Horovod's do: the gradient of each
is a collective, too, so all ranks compute the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress import mpi
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.mpi import Adasum as Adasum
from hvd_compress.integrations.mpi import Average, Compression, Max, operation
from hvd_compress.integrations.mpi import Sum as Sum
from hvd_compress.mpi import objects
from hvd_compress.mpi.objects import barrier as barrier
from hvd_compress.mpi.objects import broadcast_bytes, gather_bytes
from hvd_compress.mpi.process_sets import ProcessSet, communicator_of, global_process_set
from hvd_compress.mpi.process_sets import rank as rank
from hvd_compress.mpi.process_sets import size as size

from ..slots import native
from .nodes import node

#: of what ``training.py`` does not wrap
__all__ = [
    *("allgather", "allgather_object", "barrier", "broadcast", "broadcast_object"),
    "broadcast_variables",
]

#: as Horovod calls it
handle_average_backwards_compatibility = operation


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
    ignore_name_scope: bool = False,
) -> Any:
    """Return the average, the sum or the maximum over the ranks.

    The gradient is :func:`allreduce` of the gradient with the same options.  The maximum has none,
    nor has a method that sends less than all.

    Args:
        tensor: of the same shape and dtype on all ranks; the rows of ``tf.IndexedSlices`` are
            concatenated.
        average: older than ``op``: ``False`` means ``op=hvd.Sum``.
        device_dense, device_sparse: accepted as Horovod's; sums are made in host memory.
        compression: any method; those with a state need a ``name``.
        op: ``hvd.Average``, ``hvd.Sum`` or ``hvd.Max``.
        prescale_factor, postscale_factor: multiply before and after.
        name: of the tensor.
        process_set: the ranks that take part.
        ignore_name_scope: accepted as Horovod's.

    Raises:
        MismatchError: the ranks' tensors or options differ; inside of an error of TensorFlow if a
            graph is running.
        UnsupportedError: another ``op``, or a dtype that cannot be added.
    """
    op = operation(op, average, prescale_factor, postscale_factor)
    comm = communicator_of(process_set)
    if isinstance(tensor, tf.IndexedSlices):
        if op == Max:
            raise UnsupportedError("op=hvd.Max of tf.IndexedSlices: pass tf.convert_to_tensor(...)")
        factor = prescale_factor * postscale_factor / (comm.size if op == Average else 1)
        rows = allgather(tensor.values, name, process_set=process_set)
        indices = allgather(tensor.indices, name, process_set=process_set)
        return tf.IndexedSlices(rows * tf.cast(factor, rows.dtype), indices, tensor.dense_shape)
    x = _tensor(tensor)

    def reduced(array: np.ndarray) -> np.ndarray:
        return mpi.allreduce(np.asarray(array), op=op, comm=comm)

    def reduce(x: tf.Tensor) -> list[tf.Tensor]:
        return [_scaled(_like(_scaled(x, prescale_factor), reduced), postscale_factor)]

    def gradient(of_result: tf.Tensor) -> tf.Tensor:
        if op == Max:
            raise UnsupportedError(
                "op=hvd.Max has no gradient: hvd.allreduce(tf.stop_gradient(x), op=hvd.Max)"
            )
        return allreduce(
            of_result,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )

    return _meeting(x, reduce, gradient)


def _tensor(value: Any) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tensor={value!r} cannot be made a tensor: {error}") from error


def _scaled(x: tf.Tensor, factor: float) -> tf.Tensor:
    return x if factor == 1 else x * tf.cast(factor, x.dtype)


def _meeting(
    x: tf.Tensor,
    meet: Callable[[tf.Tensor], Sequence[tf.Tensor]],
    gradient: Callable[..., tf.Tensor],
) -> tf.Tensor:
    """Return the first of the tensors that the ranks make of theirs.

    Args:
        gradient: makes the gradient of ``x`` from that of the result, and from the other tensors.
    """

    @tf.custom_gradient
    def result(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], tf.Tensor]]:
        first, *others = meet(x)
        return first, lambda found: gradient(tf.convert_to_tensor(found), *others)

    return result(x)


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
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return :func:`allreduce` of each tensor; by a method they are exchanged together.

    Args:
        tensors: as many on all ranks, of the same shapes and dtypes.
        average, device_dense, device_sparse, compression, op, prescale_factor, postscale_factor,
            process_set, ignore_name_scope, name: as for :func:`allreduce`, whose errors these are,
            too.
    """
    options: dict[str, Any] = {
        "op": operation(op, average),
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
    }
    return [allreduce(tensor, **options) for tensor in tensors]


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return all ranks' tensors, joined along the first dimension in rank order.

    The gradient is this rank's rows of the average of the ranks' gradients.

    Args:
        tensor: of the same dtype on all ranks, and of the same shape but for the first dimension.
        name, ignore_name_scope: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        UnsupportedError: rows have no element.
    """
    x, ranks = _tensor(tensor), communicator_of(process_set).size
    if 0 in x.shape[1:]:
        raise UnsupportedError(f"allgather of {x.shape}: rows need an element")

    def gathered(array: np.ndarray) -> list[np.ndarray]:
        kind = f"allgather of {array.dtype.name} rows of {list(array.shape[1:])}"
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts = gather_bytes(raw, kind, process_set)
        rows = np.concatenate(parts).view(array.dtype).reshape(-1, *array.shape[1:])
        bytes_of_row = array.itemsize * math.prod(array.shape[1:])
        return [rows, np.array([part.size // bytes_of_row for part in parts], np.int64)]

    def gather(x: tf.Tensor) -> list[tf.Tensor]:
        return node(gathered, [x], [(x.dtype.name, (None, *x.shape[1:])), ("int64", ranks)])

    def gradient(of_result: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        mean = allreduce(of_result, process_set=process_set)
        return tf.reshape(tf.split(mean, counts)[process_set.rank()], tf.shape(x))

    return _meeting(x, gather, gradient)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return the tensor of ``root_rank``.

    The gradient is the average of the ranks' gradients on ``root_rank``, and zero elsewhere.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: whose is returned, among all ranks.
        name, ignore_name_scope: accepted as Horovod's.
        process_set: the ranks that take part, the root among them.
    """

    def gradient(of_result: tf.Tensor) -> tf.Tensor:
        mean = allreduce(of_result, process_set=process_set)
        # All ranks take part in the gradient of this one.
        return mean * tf.cast(rank() == root_rank, mean.dtype)

    send = _sender(root_rank, process_set)
    return _meeting(_tensor(tensor), lambda x: [send(x)], gradient)


def _sender(
    root_rank: int, process_set: ProcessSet, name: str = ""
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that returns the tensor of ``root_rank``; one with a ``name`` is compared
    also after the first calls."""

    def sent(array: np.ndarray) -> np.ndarray:
        own = np.array(array)
        what = f"{name}{own.dtype.name}{list(own.shape)}"
        raw = own.reshape(-1).view(np.uint8)
        broadcast_bytes(raw, root_rank, what, process_set, always=bool(name))
        return own

    return lambda x: _like(x, sent)


def _like(x: tf.Tensor, function: Callable[[np.ndarray], np.ndarray]) -> tf.Tensor:
    """Return what a function makes of an array, which has the same shape and dtype."""
    (found,) = node(lambda array: [function(array)], [x], [(x.dtype.name, x.shape)])
    return found


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """Give all ranks the values that ``variables`` have on ``root_rank``, one by one.

    Args:
        variables: as many on all ranks, of the same shapes and dtypes.
        root_rank, process_set: as for :func:`broadcast`, whose errors these are, too; they say
            which variable it is.
        inplace: accepted as Horovod's.
    """
    communicator_of(process_set)
    for place, variable in enumerate(variables):
        inner = native(variable)
        if not isinstance(inner, tf.Variable):
            raise ConfigError(f"variables[{place}] is no variable, but {variable!r}")
        send = _sender(root_rank, process_set, f"variables[{place}]: ")
        inner.assign(send(inner.read_value()))


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of ``root_rank`` on all ranks.

    Args:
        obj, root_rank, name, process_set: as for ``hvd_compress.torch.mpi.broadcast_object``, whose
            errors these are, too.
        session: accepted as Horovod's.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj, name, process_set: as for ``hvd_compress.torch.mpi.allgather_object``, whose errors
            these are, too.
        session: accepted as Horovod's.
    """
    return objects.allgather_object(obj, name, process_set)
