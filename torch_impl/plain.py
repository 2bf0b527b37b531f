"""Which tensors have their elements in memory of their own, where exchanges look for them."""

from __future__ import annotations

from typing import Any

import torch

from hvd_compress.errors import UnsupportedError

from .replicas import is_flattened, is_sharded

#: whether a tensor is one inside of torch.func
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def check_plain(x: torch.Tensor, name: str | None = None) -> None:
    """Raise ``UnsupportedError`` unless the elements of ``x`` are in memory of its own; ``name`` is
    that of the parameter."""
    flattened = is_flattened(x)
    if not (_is_elsewhere(x) or flattened):
        return
    detail = " on the device meta" if x.is_meta else " of quantised elements" * x.is_quantized
    detail += " of which FullyShardedDataParallel has left this rank a part" * flattened
    what = "what" if name is None else f"{name!r}, which"
    raise UnsupportedError(
        f"cannot compress {what} is a {type(x).__name__}{detail}: parameters that are trained, and "
        "gradients, must be plain tensors, whole on every rank. "
        + (_SHARDED if flattened or is_sharded(x) else _ELSEWHERE)
    )


def kind_without_bytes(x: Any) -> str:
    """Return what an object is that has no bytes to send, since it is no tensor or its elements are
    not in memory of its own, one by one; an empty text if it has."""
    if not isinstance(x, torch.Tensor):
        return f"a {type(x).__name__}"
    if x.layout != torch.strided or _is_elsewhere(x):
        return f"a {type(x).__name__} of {x.dtype}{list(x.shape)}, {x.layout}, on {x.device}"
    return ""


def _is_elsewhere(x: torch.Tensor) -> bool:
    # Subclasses that see every operation, of which DTensor is one, have their elements elsewhere.
    kind: Any = type(x)
    sees_operations = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return sees_operations or x.is_meta or x.is_quantized or is_wrapped(x)


_SHARDED = (
    "For a model that FSDP has sharded there is "
    "hvd_compress.torch.compress_replicas(model, mesh['replica'], ...), or a training method "
    "between replicas, hvd.DiLoCo(optimizer, process_set=mesh['replica']); with tensor "
    "parallelism alone, wrap the model in DistributedDataParallel and give it the hook of "
    "hvd_compress.torch.ddp"
)
_ELSEWHERE = (
    "Freeze it by requires_grad_(False) and train plain tensors beside it, as LoRA does; "
    "outside of torch.func, FakeTensorMode and the device meta, make the optimizer of the real "
    "model"
)
