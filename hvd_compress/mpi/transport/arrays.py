"""Arrays that collectives can work on: flat, contiguous, and in host memory.

NumPy arrays and torch tensors in host memory are used in place.  GPU arrays are torch tensors, and
all objects with DLPack or the CUDA array interface.  They travel through pinned host memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.errors import UnsupportedError

#: "bfloat16" is carried as uint16 in host memory, since NumPy has none
DTYPES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


HALVES = ("float16", "bfloat16")


class Flat(NamedTuple):
    """A user's array in the form that algorithms work on.

    Attributes:
        array: 1-D, contiguous.
        dtype: one of ``DTYPES``.
        shape: the shape of the user's array.
        give_back: a function from the finished flat array to the array that the user gets.
    """

    array: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    give_back: Callable[[Any], Any]


def flatten(x: Any) -> Flat:
    """Return an array flat, with what is needed to give the result the form of the array.  Raise
    ``UnsupportedError`` for dtypes and arrays that cannot be reduced."""
    if isinstance(x, np.ndarray | np.generic):
        return _from_numpy(np.asarray(x))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(x, torch)
    if hasattr(x, "__cuda_array_interface__") or hasattr(x, "__dlpack__"):
        return _from_dlpack(x, torch)
    raise UnsupportedError(
        f"cannot reduce {type(x).__module__}.{type(x).__qualname__}: pass a NumPy array, a torch "
        "tensor, or a GPU array with DLPack"
    )


def _known(name: str) -> str:
    if name not in DTYPES:
        raise UnsupportedError(f"cannot reduce {name}: convert it to one of {', '.join(DTYPES)}")
    return name


@functools.cache
def _name(dtype: np.dtype) -> str:
    name = _known(dtype.name)
    if not dtype.isnative:
        raise UnsupportedError("cannot reduce an array of foreign byte order: x.astype('=f4')")
    return name


def _from_numpy(x: np.ndarray) -> Flat:
    dtype = _name(x.dtype)
    flat = np.ascontiguousarray(x).reshape(-1)
    bits = flat.view(np.uint16) if dtype == "bfloat16" else flat
    return Flat(bits, dtype, x.shape, lambda done: done.view(x.dtype).reshape(x.shape))


def _from_torch(x: Any, torch: Any) -> Flat:
    dtype = _known(str(x.dtype).removeprefix("torch."))
    if x.layout != torch.strided:
        raise UnsupportedError("cannot reduce a sparse tensor: x.to_dense(), or sparse_allreduce")
    if x.grad_fn is not None and torch.is_grad_enabled():
        raise UnsupportedError(
            "no gradient passes through hvd_compress.mpi: pass x.detach(), or call allreduce of "
            "hvd_compress.torch.mpi"
        )
    flat = x.detach().contiguous().view(-1)
    if flat.device.type == "cpu":
        bits = flat.view(torch.int16) if dtype == "bfloat16" else flat
        array = bits.numpy().view(np.uint16) if dtype == "bfloat16" else bits.numpy()

        def from_host(done: np.ndarray) -> Any:
            if dtype == "bfloat16":
                return torch.from_numpy(done.view(np.int16)).view(torch.bfloat16).view(x.shape)
            return torch.from_numpy(done).view(x.shape)

        return Flat(array, dtype, tuple(x.shape), from_host)
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
    host.copy_(flat)
    staged = _from_torch(host, torch)
    return Flat(
        staged.array,
        dtype,
        tuple(x.shape),
        lambda done: staged.give_back(done).to(x.device).view(x.shape),
    )


def _from_dlpack(x: Any, torch: Any) -> Flat:
    if not hasattr(x, "__dlpack__") or torch is None:
        raise UnsupportedError(
            f"{type(x).__qualname__} on a GPU is reduced by way of torch: import torch before, and "
            "pass an array with __dlpack__"
        )
    flat = _from_torch(torch.from_dlpack(x), torch)
    library = sys.modules[type(x).__module__.partition(".")[0]]

    def give_back(done: Any) -> Any:
        return library.from_dlpack(flat.give_back(done))

    return Flat(flat.array, flat.dtype, flat.shape, give_back)


def describe(flat: Flat) -> str:
    """Return dtype and shape as text, such as float32[3, 4]."""
    return f"{flat.dtype}{list(flat.shape)}"
