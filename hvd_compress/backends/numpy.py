"""NumPy: the reference for every other backend; see :class:`hvd_compress.backends.base.Backend`."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvd_compress.backends import halves
from hvd_compress.backends.base import EagerBackend, HostFunction, Output
from hvd_compress.errors import UnsupportedError

Array = np.ndarray

traces = False
# A product of stacks is made matrix by matrix, and its bits depend on where these begin.
batches = False

# NumPy's own, under the protocol's names.
full_like = np.full_like
size = np.size
shape = np.shape
abs = np.abs
maximum = np.maximum
scale = operator.mul
divided = operator.truediv
sqrt = np.sqrt
nonzero = np.flatnonzero
reshape = np.reshape
matmul = operator.matmul
concat = np.concatenate
stack = np.stack
unstack = list
sort = np.sort
take = operator.getitem

_HALVES = {np.dtype(np.float16), np.dtype(np.float32)}


def check_gradient(x: Array, in_place: bool = False) -> None:
    if x.dtype.kind != "f" or x.dtype.itemsize > 8 or not x.dtype.isnative:
        raise UnsupportedError(
            f"cannot compress an array of {x.dtype}: gradients must be float16, float32 or "
            "float64 in this machine's byte order; convert it with .astype('float32')"
        )
    if in_place and not x.flags.writeable:
        raise UnsupportedError(
            "in_place=True writes results into gradients, and one is read-only: pass a copy of it, "
            "map its file with mode='r+' or 'c', or leave in_place out"
        )


def widen(x: Array) -> Array:
    flat = x.reshape(-1)
    return cast(flat, np.float32) if x.dtype == np.float16 else flat


def restore(flat: Array, like: Array) -> Array:
    return cast(flat.reshape(like.shape), like.dtype)


def zeros(n: int, like: Array) -> Array:
    return np.zeros(n, like.dtype)


def copy(x: Array) -> Array:
    return x.copy()


def norm(x: Array) -> float:
    return float(np.sqrt(np.sum(np.square(x, dtype=np.float64))))


def sum(x: Array) -> float:
    return float(np.sum(x, dtype=np.float64))


def affine(x: Array, factor: float, shift: float = 0.0) -> Array:
    return x * factor + shift


def add_scaled(x: Array, y: Array, factor: float) -> Array:
    return x + y * factor


def lerp(x: Array, y: Array, weight: float) -> Array:
    return x + (y - x) * weight


def lerp_square(x: Array, y: Array, weight: float) -> Array:
    return x + (y * y - x) * weight


def scalar(value: float, like: Array) -> float:
    return value


def vector_norm(arrays: Sequence[Array]) -> float:
    return math.hypot(*map(norm, arrays))


def max(x: Array) -> float:
    return float(x.max())


def clip(x: float, low: float, high: float) -> float:
    return float(np.clip(x, low, high))


def where(condition: bool, x: Any, y: Any) -> Any:
    return x if condition else y


def put_where(x: Array, condition: Array, value: float) -> Array:
    return np.where(condition, x.dtype.type(value), x)


def all_finite(x: Array) -> bool:
    return bool(np.isfinite(x).all())


def kth_largest(x: Array, k: int) -> Array:
    n = x.shape[-1]
    return np.partition(x, n - k)[..., n - k]


def transpose(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def orthonormal_columns(x: Array) -> Array:
    q, r = np.linalg.qr(x)
    diagonal = np.diagonal(r, axis1=-2, axis2=-1)
    return q * np.where(diagonal < 0, x.dtype.type(-1), x.dtype.type(1))[..., None, :]


def end_to_end(arrays: Sequence[Array]) -> Array:
    flat = [x.reshape(-1) for x in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


def split(x: Array, sizes: Sequence[int]) -> list[Array]:
    ends = list(itertools.accumulate(sizes))
    return [x[end - n : end] for end, n in zip(ends, sizes, strict=True)]


def put(x: Array, indices: Array, values: Array | float) -> Array:
    x[indices] = values
    return x


def add_at(x: Array, indices: Array, values: Array) -> Array:
    x[indices] += values
    return x


def cast(x: Array, dtype: np.typing.DTypeLike) -> Array:
    if x.dtype == dtype:
        return x
    if {x.dtype, np.dtype(dtype)} == _HALVES:  # where NumPy is slow
        out = np.empty(x.shape, dtype)
        (halves.narrow if out.dtype == np.float16 else halves.widen)(x, out)
        return out
    # An overflow must arrive as Inf and a NaN as NaN, not as a warning.
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype, copy=False)


def round_to(x: Array, wire: str | None, saturate: bool = False) -> Array:
    if wire is None or wire == dtype(x):
        return x
    if wire == "bfloat16":
        return cast(halves.from_bfloat16(halves.to_bfloat16(cast(x, "float32"))), dtype(x))
    if saturate:
        limit = float(np.finfo(wire).max)
        x = np.clip(x, -limit, limit)
    return cast(cast(x, wire), dtype(x))


def dtype(x: Array) -> str:
    return _name_of(x.dtype)


@functools.cache
def _name_of(dtype: np.dtype) -> str:  # which NumPy makes up anew each time
    return dtype.name if dtype.isnative else dtype.str


def to_bytes(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def from_bytes(raw: Array, dtype: str, like: Array) -> Array:
    return raw.view(dtype)


def choose(condition: bool, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    return yes() if condition else no()


either = choose


def on_host(
    function: HostFunction, inputs: Sequence[Any], outputs: Sequence[Output], like: Array
) -> list[Array]:
    return list(function(*inputs))


def pack_sizes(arrays: Sequence[Array]) -> Array:
    return np.array([x.size for x in arrays], "<i8").view(np.uint8)


def unpack_sizes(table: Array, count: int) -> list[int]:
    return np.frombuffer(table.tobytes().ljust(8 * count, b"\0"), "<i8").tolist()


def from_numpy(x: Array, like: Array | None) -> Array:
    return x


def to_numpy(x: Array) -> Array:
    return x


def address(x: Array) -> int | None:
    fits = x.flags.c_contiguous and x.flags.aligned and x.dtype.isnative
    return x.__array_interface__["data"][0] if fits else None


def addresses(
    arrays: Sequence[Array], sizes: Sequence[int], dtype: str, device: Any
) -> list[int] | None:
    wanted = np.dtype(dtype)
    found = [
        x.__array_interface__["data"][0]
        for x, n in zip(arrays, sizes, strict=True)
        if x.size == n
        and x.dtype == wanted
        # For most arrays the first of these is enough, which is found in one look.
        and ((flags := x.flags).carray or (flags.c_contiguous and flags.aligned))
    ]
    return found if len(found) == len(arrays) else None


def flat_on_host(arrays: Sequence[Array]) -> list[np.ndarray]:
    return [x.reshape(-1) for x in arrays]


def write_into(out: Sequence[Array], x: Array, divisor: float = 1.0) -> None:
    for array, part in zip(out, split(x, [array.size for array in out]), strict=True):
        # Not a flat view of the array, which there may not be.
        shaped = part.reshape(array.shape)
        if divisor == 1 or x.itemsize < array.itemsize:  # it is divided in the wider dtype
            np.copyto(array, shaped)
            shaped = array
        if divisor != 1:
            np.divide(shaped, shaped.dtype.type(divisor), out=array)


def loops(x: Array) -> str | None:
    return None if address(x) is None else "hvd_compress.kernels"


if TYPE_CHECKING:  # the module is held to the protocol
    from hvd_compress.backends import numpy

    _: EagerBackend = numpy
