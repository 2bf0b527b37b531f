"""TensorFlow tensors, with values or symbolic; see :class:`hvd_compress.backends.base.Backend`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvd_compress.backends import HostFunction, Output, TracingBackend
from hvd_compress.errors import UnsupportedError

from .selection import top_k as top_k

Array: TypeAlias = tf.Tensor

traces = True
batches = True

# TensorFlow's own, under the protocol's names.
copy = tf.identity
abs = tf.abs
maximum = tf.maximum
divided = operator.truediv
sqrt = tf.sqrt
clip = tf.clip_by_value
where = tf.where
reshape = tf.reshape
matmul = tf.matmul
transpose = tf.linalg.matrix_transpose
split = tf.split
stack = tf.stack
unstack = tf.unstack
take = tf.gather
cast = tf.cast

_HALF = (tf.float16, tf.bfloat16)


def check_gradient(x: Array, in_place: bool = False) -> None:
    if x.dtype not in (*_HALF, tf.float32, tf.float64):
        raise UnsupportedError(
            f"cannot compress a tensor of {x.dtype.name}: gradients must be float16, bfloat16, "
            "float32 or float64"
        )


def widen(x: Array) -> Array:
    flat = x if x.shape.rank == 1 else tf.reshape(x, [-1])
    return tf.cast(flat, tf.float32) if x.dtype in _HALF else flat


def restore(flat: Array, like: Array) -> Array:
    shaped = flat if flat.shape == like.shape else tf.reshape(flat, like.shape)
    return tf.cast(shaped, like.dtype)


def zeros(n: int, like: Array) -> Array:
    return tf.zeros([n], like.dtype)


def full_like(x: Array, value: float) -> Array:
    return tf.fill(tf.shape(x), tf.constant(value, x.dtype))


def size(x: Array) -> Any:
    """Return a number where the shape is known, else a symbol."""
    known = x.shape.num_elements()
    return tf.size(x, tf.int64) if known is None else known


def shape(x: Array) -> tuple[int, ...]:
    return tuple(x.shape)


def norm(x: Array) -> Array:
    return tf.sqrt(tf.reduce_sum(tf.square(tf.cast(x, tf.float64))))


def sum(x: Array) -> Array:
    return tf.reduce_sum(tf.cast(x, tf.float64))


def scale(x: Array, factor: Any) -> Array:
    return x * _number(factor, x.dtype)


def affine(x: Array, factor: Any, shift: Any = 0.0) -> Array:
    scaled = scale(x, factor)
    return scaled if isinstance(shift, float) and not shift else scaled + _number(shift, x.dtype)


def _number(value: Any, dtype: tf.DType) -> Array:
    # A cast would make float32 of a number of Python first.
    return tf.cast(value, dtype) if tf.is_tensor(value) else tf.constant(value, dtype)


def add_scaled(x: Array, y: Array, factor: Any) -> Array:
    return x + scale(y, factor)


def lerp(x: Array, y: Array, weight: float) -> Array:
    return x + scale(y - x, weight)


def lerp_square(x: Array, y: Array, weight: float) -> Array:
    return x + scale(tf.square(y) - x, weight)


def scalar(value: float, like: Array) -> Array:
    return tf.constant(value, tf.float64)


def vector_norm(arrays: Sequence[Array]) -> Array:
    wide = [tf.cast(x, tf.float32) if x.dtype in _HALF else x for x in arrays]
    squares = [tf.cast(tf.reduce_sum(tf.square(x)), tf.float64) for x in wide]
    return tf.sqrt(tf.add_n(squares))


def max(x: Array) -> Array:
    return tf.cast(tf.reduce_max(x), tf.float64)


def put_where(x: Array, condition: Array, value: float) -> Array:
    return tf.where(condition, tf.constant(value, x.dtype), x)


def all_finite(x: Array) -> Array:
    return tf.reduce_all(tf.math.is_finite(x))


def orthonormal_columns(x: Array) -> Array:
    q, r = tf.linalg.qr(x)
    signs = tf.where(tf.linalg.diag_part(r) < 0, tf.constant(-1, x.dtype), 1)
    return q * signs[..., None, :]


def concat(arrays: list[Array], axis: int = 0) -> Array:
    return tf.concat(arrays, axis)


def end_to_end(arrays: Sequence[Array]) -> Array:
    flat = [x if x.shape.rank == 1 else tf.reshape(x, [-1]) for x in arrays]
    return flat[0] if len(flat) == 1 else tf.concat(flat, 0)


def put(x: Array, indices: Array, values: Array | float) -> Array:
    if isinstance(values, float):
        values = tf.fill(tf.shape(indices), tf.constant(values, x.dtype))
    return tf.tensor_scatter_nd_update(x, indices[:, None], values)


def add_at(x: Array, indices: Array, values: Array) -> Array:
    return tf.tensor_scatter_nd_add(x, indices[:, None], values)


def round_to(x: Array, wire: str | None, saturate: bool = False) -> Array:
    if wire is None or wire == dtype(x):
        return x
    if saturate:
        limit = tf.constant(tf.as_dtype(wire).max, x.dtype)
        x = tf.clip_by_value(x, -limit, limit)
    return tf.cast(tf.cast(x, wire), x.dtype)


def dtype(x: Array) -> str:
    return x.dtype.name


def to_bytes(x: Array) -> Array:
    return tf.reshape(tf.bitcast(x, tf.uint8), [-1])


def from_bytes(raw: Array, dtype: str, like: Array) -> Array:
    kind = tf.as_dtype(dtype)
    return tf.bitcast(tf.reshape(raw, [-1, kind.size]), kind)


def choose(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    if isinstance(condition, bool):
        return yes() if condition else no()
    return tf.cond(condition, yes, no)


def either(condition: Any, yes: Callable[[], Array], no: Callable[[], Array]) -> Array:
    if isinstance(condition, bool):
        return yes() if condition else no()
    return tf.where(condition, yes(), no())


def on_host(
    function: HostFunction, inputs: Sequence[Any], outputs: Sequence[Output], like: Array
) -> list[Array]:
    if tf.executing_eagerly():  # errors keep their type
        arrays = [x.numpy() if isinstance(x, tf.Tensor) else x for x in inputs]
        return [tf.convert_to_tensor(result) for result in function(*arrays)]
    # Not stateful: those would wait for each other, and other ranks with them.
    results = tf.numpy_function(
        function, list(inputs), [tf.as_dtype(dtype) for dtype, _ in outputs], stateful=False
    )
    for result, (_, length) in zip(results, outputs, strict=True):
        result.set_shape(length if isinstance(length, tuple) else [length])
    return results


def pack_sizes(arrays: Sequence[Array]) -> Array:
    sizes = tf.stack([tf.size(x, tf.int64) for x in arrays])
    return tf.reshape(tf.bitcast(sizes, tf.uint8), [-1])


def unpack_sizes(table: Array, count: int) -> list[Any]:
    whole = tf.pad(table, [[0, 8 * count - tf.size(table)]])
    return tf.unstack(tf.bitcast(tf.reshape(whole, [count, 8]), tf.int64))


def from_numpy(x: np.ndarray, like: Array | None) -> Array:
    return tf.convert_to_tensor(x)


def to_numpy(x: Array) -> np.ndarray:
    return x.numpy()


def address(x: Array) -> int | None:
    return None


def loops(x: Array) -> str | None:
    # Where a graph's tensors will be is decided when it runs, unless there is no choice.
    device = tf.DeviceSpec.from_string(x.device).device_type
    on_host = device == "CPU" if device else not tf.config.get_visible_devices("GPU")
    return "hvd_compress.kernels" if on_host else None


if TYPE_CHECKING:  # the module is held to the protocol
    from . import backend

    _: TracingBackend = backend
