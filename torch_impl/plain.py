"""Which tensors have their elements in memory of their own, where exchanges look for them."""

from __future__ import annotations

from typing import Any

import torch

from hvd_compress.errors import UnsupportedError

from .replicas import is_flattened, is_sharded

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def check_plain(x: torch.Tensor, name: str | None = None) -> None:
    """Raise ``UnsupportedError`` unless the elements of ``x`` are in memory of its own; ``name`` is
    that of the parameter."""
    kind: Any = type(x)
    # Subclasses that see every operation, of which DTensor is one, have their elements elsewhere.
    sees_operations = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    flattened = is_flattened(x)
    if not (sees_operations or x.is_meta or x.is_quantized or _is_wrapped(x) or flattened):
        return
    detail = " on the device meta" if x.is_meta else " of quantised elements" * x.is_quantized
    detail += " of which FullyShardedDataParallel has left this rank a part" * flattened
    what = "what" if name is None else f"{name!r}, which"
    raise UnsupportedError(
        f"cannot compress {what} is a {kind.__name__}{detail}: parameters that are trained, and "
        "gradients, must be plain tensors, whole on every rank. "
        + (_SHARDED if flattened or is_sharded(x) else _ELSEWHERE)
    )


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
