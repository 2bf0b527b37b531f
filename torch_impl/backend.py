"""Torch tensors on any device; see :class:`hvd_compress.backends.base.Backend`."""

from __future__ import annotations

import functools
import importlib
import logging
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hvd_compress.backends import EagerBackend, HostFunction, Output, numpy
from hvd_compress.errors import UnsupportedError

from .parameters import check_plain

Array = torch.Tensor

logger = logging.getLogger("hvd_compress")

traces = False
batches = True

# PyTorch's own, under the protocol's names.
full_like = torch.full_like
copy = torch.clone
size = torch.Tensor.numel
abs = torch.abs
maximum = torch.maximum
sqrt = torch.sqrt
max = torch.amax
clip = torch.clamp
where = torch.where
put_where = torch.Tensor.masked_fill_
reshape = torch.reshape
matmul = torch.matmul
concat = torch.cat
split = torch.split
stack = torch.stack
unstack = torch.unbind
take = operator.getitem

# With values, these are Python's own.
put = numpy.put
add_at = numpy.add_at

_HALF = (torch.float16, torch.bfloat16)
GRADIENTS = (*_HALF, torch.float32, torch.float64)


def check_gradient(x: Array, in_place: bool = False) -> None:
    check_plain(x)
    if x.layout is not torch.strided:
        raise UnsupportedError(f"cannot compress a {x.layout} tensor: pass sparse_as_dense=True")
    if x.dtype not in GRADIENTS:
        raise UnsupportedError(
            f"cannot compress a tensor of {x.dtype}: gradients must be float16, bfloat16, float32 "
            "or float64"
        )


# These two are called for every tensor of a step, and any operation, even one that changes nothing,
# takes longer than to find out that it would.


def widen(x: Array) -> Array:
    x = x.detach() if x.requires_grad else x
    flat = x if x.dim() == 1 else x.reshape(-1)
    return flat.float() if x.dtype in _HALF else flat


def restore(flat: Array, like: Array) -> Array:
    x = flat if flat.shape == like.shape else flat.reshape(like.shape)
    return x if x.dtype is like.dtype else x.to(like.dtype)


def zeros(n: int, like: Array) -> Array:
    return torch.zeros(n, dtype=like.dtype, device=like.device)


def shape(x: Array) -> tuple[int, ...]:
    return tuple(x.shape)


def norm(x: Array) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item()


def sum(x: Array) -> float:
    return x.sum(dtype=torch.float64).item()


def scale(x: Array, factor: Any) -> Array:
    if isinstance(factor, torch.Tensor) and factor.device != x.device:  # a norm over several
        factor = factor.to(x.device)
    return x * factor


def divided(x: Array, divisor: float) -> Array:
    # By a number a GPU does not divide, but multiplies with its inverse.
    return x / (torch.full((), divisor, dtype=x.dtype, device=x.device) if x.is_cuda else divisor)


def affine(x: Array, factor: float, shift: float = 0.0) -> Array:
    x = x if factor == 1 else x.mul_(factor)
    return x if shift == 0 else x.add_(shift)


def add_scaled(x: Array, y: Array, factor: Any) -> Array:
    # Either is one pass over memory.
    if isinstance(factor, torch.Tensor):
        return x.addcmul_(y, factor.to(x.device))
    return x.add_(y, alpha=factor)


def lerp(x: Array, y: Array, weight: float) -> Array:
    return x.lerp_(y.to(x.dtype), weight)  # a parameter may have got another dtype since


def lerp_square(x: Array, y: Array, weight: float) -> Array:
    return x.mul_(1 - weight).addcmul_(y, y, value=weight)


def scalar(value: float, like: Array) -> Array:
    return torch.full((), value, dtype=_accumulates_in(like), device=like.device)


def vector_norm(arrays: Sequence[Array]) -> Array:
    norms = [torch.linalg.vector_norm(x, dtype=_accumulates_in(x)) for x in arrays]
    if len(norms) == 1:
        return norms[0]
    device = norms[0].device
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in norms))
    return torch.linalg.vector_norm(torch.stack([x.to(device, dtype) for x in norms]))


def _accumulates_in(x: Array) -> torch.dtype:
    return torch.float32 if x.dtype in _HALF else x.dtype


def all_finite(x: Array) -> bool:
    # A sum with a NaN or an Inf in it is never finite. It is several times faster than looking at
    # every element, which only has to be done if finite elements may have overflowed.
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def kth_largest(x: Array, k: int) -> Array:
    if x.device.type == "cpu":  # NumPy's partition is ten times as fast as torch's topk here
        n = x.shape[-1]
        return torch.from_numpy(np.array(np.partition(x.numpy(), n - k)[..., n - k]))
    return torch.topk(x, k, sorted=False).values.amin(-1)


def nonzero(mask: Array) -> Array:
    return torch.nonzero(mask).view(-1)


def transpose(x: Array) -> Array:
    return x.mT


def orthonormal_columns(x: Array) -> Array:
    q, r = torch.linalg.qr(x)
    diagonal = r.diagonal(dim1=-2, dim2=-1)
    return q * torch.where(diagonal < 0, -1.0, 1.0).to(x.dtype)[..., None, :]


def end_to_end(arrays: Sequence[Array]) -> Array:
    flat = [x.reshape(-1) for x in arrays]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).detach()


def sort(x: Array) -> Array:
    return x.sort().values


def cast(x: Array, dtype: str) -> Array:
    return x.to(getattr(torch, dtype))


def round_to(x: Array, wire: str | None, saturate: bool = False) -> Array:
    if wire is None or wire == dtype(x):
        return x
    if saturate:
        limit = torch.finfo(getattr(torch, wire)).max
        x = x.clamp(-limit, limit)
    return x.to(getattr(torch, wire)).to(x.dtype)


def dtype(x: Array) -> str:
    return _name_of(x.dtype)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def to_bytes(x: Array) -> Array:
    return x.contiguous().view(-1).view(torch.uint8)


def from_bytes(raw: Array, dtype: str, like: Array) -> Array:
    return raw.view(getattr(torch, dtype)).to(like.device)


def choose(condition: bool, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    return yes() if condition else no()


either = choose


def on_host(
    function: HostFunction, inputs: Sequence[Any], outputs: Sequence[Output], like: Array
) -> list[Array]:
    theirs = iter(_to_host([x for x in inputs if isinstance(x, torch.Tensor)]))
    arrays = [next(theirs) if isinstance(x, torch.Tensor) else x for x in inputs]
    # Bytes are messages, which are sent and read in host memory.
    return [from_numpy(x, None if x.dtype == np.uint8 else like) for x in function(*arrays)]


def pack_sizes(arrays: Sequence[Array]) -> Array:
    sizes = np.array([x.numel() for x in arrays], np.int64).view(np.uint8)
    return torch.from_numpy(sizes).to(arrays[0].device)


def unpack_sizes(table: Array, count: int) -> list[int]:
    return np.frombuffer(bytes(table.tolist()).ljust(8 * count, b"\0"), "<i8").tolist()


def from_numpy(x: np.ndarray, like: Array | None) -> Array:
    if not x.flags.writeable or not x.flags.aligned:
        x = x.copy()
    tensor = torch.from_numpy(x)
    if x.dtype == np.int32:
        tensor = tensor.long()
    if like is None:
        return tensor
    if like.is_cuda:  # from pinned memory, or this would wait for all that the GPU still has to do
        tensor = tensor.pin_memory()
    return tensor.to(like.device, non_blocking=like.is_cuda)


def to_numpy(x: Array) -> np.ndarray:
    return _to_host([x])[0] if x.is_cuda else x.detach().cpu().numpy()


def _to_host(tensors: Sequence[Array]) -> list[np.ndarray]:
    """Return arrays of NumPy: of tensors on a GPU, copies for all of which it is waited once."""
    copies = [
        torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
        if x.is_cuda
        else x.cpu()
        for x in (x.detach() for x in tensors)
    ]
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return [x.numpy() for x in copies]


class Arriving:
    """A tensor that is copied to host memory, while nobody waits for it."""

    def __init__(self, x: torch.Tensor) -> None:
        self._copy, self._is_there = x, None
        if x.is_cuda:
            self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._copy.copy_(x, non_blocking=True)
            self._is_there = torch.cuda.Event()
            self._is_there.record(torch.cuda.current_stream(x.device))

    def arrived(self) -> torch.Tensor:
        """Wait for it, and return it."""
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._copy


def address(x: Array) -> int | None:
    return x.data_ptr() if x.device.type in ("cpu", "cuda") and x.is_contiguous() else None


def addresses(
    arrays: Sequence[Array], sizes: Sequence[int], dtype: str, device: Any
) -> list[int] | None:
    kind = getattr(torch, dtype)
    found = [
        x.data_ptr()
        for x, n in zip(arrays, sizes, strict=True)
        if x.dtype is kind and x.numel() == n and x.device == device and x.is_contiguous()
    ]
    # Null: the storage was freed under the tensor.
    return found if len(found) == len(arrays) and all(found) else None


def flat_on_host(arrays: Sequence[Array]) -> list[np.ndarray]:
    return [x.detach().view(-1).numpy() for x in arrays]


def write_into(out: Sequence[Array], x: Array, divisor: float = 1.0) -> None:
    sizes = [array.numel() for array in out]
    # A write of ours must not look like one of the user's, who changes the version of a gradient.
    views = [array.data for array in out]
    x = divided(x, divisor) if x.is_cuda and divisor != 1 else x
    # Their owner may have given them other strides since the exchange began.
    pairs = zip(torch.split(x, sizes), views, strict=True)
    parts = [part.view(view.shape) for part, view in pairs]
    if not x.is_cuda and divisor != 1 and x.element_size() < views[0].element_size():
        for view, part in zip(views, parts, strict=True):  # it is divided in the wider dtype
            view.copy_(part).div_(divisor)
    elif not x.is_cuda and (divisor != 1 or x.dtype == views[0].dtype):
        for view, part in zip(views, parts, strict=True):
            torch.div(part, divisor, out=view)
    elif x.is_cuda and len({view.data_ptr() for view in views}) == len(views):
        torch._foreach_copy_(views, parts)  # one launch for many, whose order does not matter
    else:
        for view, part in zip(views, parts, strict=True):
            view.copy_(part)


def loops(x: Array) -> str | None:
    if not x.is_contiguous():
        return None
    if x.device.type == "cpu":
        return "hvd_compress.kernels"
    # Places within a tensor are 32-bit integers there.
    fits = x.is_cuda and x.numel() < 2**31
    return "hvd_compress.torch.triton.loops" if fits and _has_triton(x.device) else None


@functools.cache
def _has_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a GPU, with the right bits; says once what is wrong."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (7, 0):
        problem = "Triton's kernels need an NVIDIA GPU of compute capability 7.0 or more"
    elif "tensorflow" in sys.modules and "triton" not in sys.modules:
        # Both bring LLVM, which ends the process if it comes a second time in this order.
        problem = "TensorFlow was imported before Triton: import triton first"
    elif not hasattr(_triton_language(), "div_rn"):
        problem = "Triton 3.0 or newer is missing: pip install triton"
    else:
        check = importlib.import_module("hvd_compress.torch.triton.check")
        if (problem := check.problem_of(device)) is None:
            return True
    logger.warning(
        "top-k on %s takes many passes over memory, and codecs work on the host, which has "
        "to be so on all ranks with GPUs: %s",
        device,
        problem,
    )
    return False


def _triton_language() -> Any:
    try:
        return importlib.import_module("triton.language")
    except ImportError:
        return None


if TYPE_CHECKING:  # the module is held to the protocol
    from . import backend

    _: EagerBackend = backend
