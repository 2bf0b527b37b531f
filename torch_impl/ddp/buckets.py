"""The gradients in a bucket of DistributedDataParallel, and which parameters a pass has used.

A bucket is one flat buffer.  ``GradBucket.gradients()`` cuts it as if each parameter were real,
with its elements in their own order.  Complex parameters and those of another memory format are
not.  So it is cut here, as DDP cuts it: by the parameters' shapes and strides.

If no rank has used a parameter, DDP drops the hook's result.  The elements that an exchange takes
from the residual would be lost, so the state of such a parameter stays as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.errors import UnsupportedError


def check_bucket(bucket: Any) -> None:
    """Raise ``UnsupportedError`` unless this is a bucket of gradients that are dense."""
    if not isinstance(bucket, dist.GradBucket):
        raise UnsupportedError(
            f"ddp_hook got {type(bucket).__name__} instead of a bucket: PyTorch's Python "
            "reducer hands over gradients one by one. Write torch._dynamo.config.optimize_ddp = "
            'True instead of "python_reducer", before DistributedDataParallel is made'
        )
    if bucket.buffer().layout is not torch.strided:
        raise UnsupportedError(
            "ddp_hook got the sparse gradient of an embedding: make it dense, by "
            "torch.nn.Embedding(..., sparse=False); or drop DistributedDataParallel and use "
            "hvd.DistributedOptimizer, over Horovod or MPI, which sends its rows"
        )


def cut(bucket: dist.GradBucket) -> list[torch.Tensor]:
    """Return views of the buffer, one for each of the bucket's parameters, which have its elements
    in the parameter's order.  Those of complex parameters are real, with one dimension more."""
    buffer, parameters = bucket.buffer(), bucket.parameters()
    is_complex = any(p.is_complex() for p in parameters)
    as_real = is_complex and not buffer.is_complex()
    flat = torch.view_as_complex(buffer.view(-1, 2)) if as_real else buffer
    sizes = [p.numel() for p in parameters]
    if sum(sizes) != flat.numel():
        raise UnsupportedError(
            f"DistributedDataParallel hands over a bucket of {buffer.numel()} elements of "
            f"{buffer.dtype}, and its parameters have {sum(sizes)}: a model of this kind cannot "
            "have ddp_hook yet; leave the hook out, or use hvd.DistributedOptimizer"
        )
    parts = zip(torch.split(flat, sizes), parameters, strict=True)
    views = [
        # DDP gives those that have gaps or share memory the order of their elements.
        part.as_strided(p.shape, p.stride()) if _is_dense(p) else part.view(p.shape)
        for part, p in parts
    ]
    return [torch.view_as_real(view) for view in views] if is_complex else views


def _is_dense(p: torch.Tensor) -> bool:
    """Whether the elements fill the memory between the first and the last, each with its own."""
    if p.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def may_leave_out(model: torch.nn.Module | None) -> bool:
    """Return whether a backward pass of a model may leave parameters out.  DDP says so of itself; a
    model outside of DDP may."""
    if not isinstance(model, DistributedDataParallel):
        return True
    return bool(model.find_unused_parameters or model.static_graph)


class UsedParameters:
    """Notes the parameters whose gradients autograd has written since :meth:`forget`."""

    def __init__(self) -> None:
        self._noted: list[torch.Tensor] = []
        self._hooks: dict[int, Any] = {}  # by id: to hash a parameter takes long
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note parameters from now on."""
        for p in parameters:
            if p.requires_grad and id(p) not in self._hooks:
                self._hooks[id(p)] = p.register_post_accumulate_grad_hook(self._noted.append)

    def unused(self, gradients: Mapping[str, torch.Tensor], of: Iterable[torch.Tensor]) -> set[str]:
        """Return the names of gradients that are zeros, since this rank did not use the parameters
        ``of`` which they are."""
        used = {id(p) for p in self._noted}
        return {
            name
            for (name, gradient), p in zip(gradients.items(), of, strict=True)
            if id(p) in self._hooks and id(p) not in used and not gradient.any()
        }

    def forget(self) -> None:
        """Begin again, since the gradients have been exchanged."""
        self._noted.clear()


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
