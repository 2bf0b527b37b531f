"""Horovod's functions on single tensors and objects, over MPI.

``allreduce``, ``allgather`` and ``broadcast`` pass gradients as Horovod's do: the gradient of each
is a collective, too, so all ranks run the same backward passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_compress import mpi
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.horovod import without_state
from hvd_compress.integrations.mpi import Adasum as Adasum
from hvd_compress.integrations.mpi import Average as Average
from hvd_compress.integrations.mpi import Compression, Max, operation
from hvd_compress.integrations.mpi import Sum as Sum
from hvd_compress.mpi.collectives.dense import ALGORITHMS
from hvd_compress.mpi.collectives.dense_running import reducing
from hvd_compress.mpi.objects import allgather_object as allgather_object
from hvd_compress.mpi.objects import barrier as barrier
from hvd_compress.mpi.objects import broadcast_bytes, gather_bytes
from hvd_compress.mpi.objects import broadcast_object as broadcast_object
from hvd_compress.mpi.process_sets import ProcessSet, communicator_of, global_process_set
from hvd_compress.mpi.process_sets import rank as rank
from hvd_compress.mpi.transport.arrays import flatten

from ..eager import eager
from ..parameters import kind_without_bytes

__all__ = [
    *("allgather", "allgather_object", "allreduce", "allreduce_", "allreduce_async", "barrier"),
    *("broadcast", "broadcast_", "broadcast_object", "synchronize"),
]

_Step = Callable[[torch.Tensor], torch.Tensor]


class _Differentiable(torch.autograd.Function):
    """A collective of all ranks as a function of autograd, with the collective of its gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, meet: _Step, gradient: _Step) -> torch.Tensor:
        ctx.gradient = gradient
        return meet(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.gradient(*gradients), None, None


class _Handle(NamedTuple):
    work: Any
    finish: Callable[[], torch.Tensor]


@eager
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> _Handle:
    """Begin :func:`allreduce` and return a handle for :func:`synchronize`; does not wait.

    No gradient passes through it, as through Horovod's.

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set: as for
            :func:`allreduce`, whose errors these are, too.
    """
    comm = communicator_of(process_set)
    with comm.told():
        _check_tensor(tensor)
        op = operation(op, average, prescale_factor, postscale_factor)
        flat = flatten(_scaled(tensor.detach(), prescale_factor))
    call = f"allreduce({flat.dtype if name is None else name}{list(flat.shape)}, {op})"
    comm.agree(call)
    out = flat.array.copy()
    work = reducing(comm, call, ALGORITHMS["direct"], flat.array, flat.dtype, out, op)
    return _Handle(work, lambda: _scaled(flat.give_back(out), postscale_factor).to(tensor.dtype))


@eager
def synchronize(handle: _Handle) -> torch.Tensor:
    """Wait for the operation that ``handle`` stands for, and return its result.

    Args:
        handle: what :func:`allreduce_async` returned.
    """
    if not isinstance(handle, _Handle):
        raise ConfigError(f"handle={handle!r}: pass what hvd.allreduce_async(...) returned")
    handle.work.wait()
    return handle.finish()


@eager
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the average, the sum or the maximum over the ranks, in a new tensor.

    The gradient is :func:`allreduce` of the gradient with the same options; the maximum has none.

    Args:
        tensor: of the same shape and dtype on all ranks, floats or integers.
        average: older than ``op``: ``False`` means ``op=hvd.Sum``.
        name: shown in error messages.
        compression: ``hvd.FP16`` or ``hvd.Compression.fp16`` sends half precision.
        op: ``hvd.Average``, ``hvd.Sum`` or ``hvd.Max``.
        prescale_factor, postscale_factor: multiply before and after.
        process_set: the ranks that take part.

    Raises:
        UnboundError: the compression is one that needs an optimizer.
        UnsupportedError: another ``op``, or a dtype that cannot be added.
    """
    comm = communicator_of(process_set)
    with comm.told():
        _check_tensor(tensor)
        op = operation(op, average, prescale_factor, postscale_factor)
        is_half = without_state(compression) == "fp16" and tensor.is_floating_point()

    def reduced(x: torch.Tensor) -> torch.Tensor:
        total = mpi.allreduce(_scaled(x, prescale_factor), op=op, comm=comm)
        return _scaled(total, postscale_factor).to(x.dtype)

    def gradient(of_result: torch.Tensor) -> torch.Tensor:
        if op == Max:
            raise UnsupportedError(
                "op=hvd.Max has no gradient: hvd.allreduce(x.detach(), op=hvd.Max)"
            )
        factors = prescale_factor, postscale_factor
        return allreduce(of_result, None, name, Compression.none, op, *factors, process_set)

    sent = tensor.half() if is_half else tensor
    return _Differentiable.apply(sent, reduced, gradient).to(tensor.dtype)


@eager
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    *,
    compression: Any = Compression.none,
) -> torch.Tensor:
    """Put the average, the sum or the maximum over the ranks into ``tensor``, and return it.

    Autograd does not see it, as it does not see Horovod's.

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, compression: as
            for :func:`allreduce`, whose errors these are, too; in the order of Horovod's
            ``allreduce_``, which has no ``compression``.
    """
    factors = prescale_factor, postscale_factor
    with torch.no_grad():
        total = allreduce(tensor, average, name, compression, op, *factors, process_set)
        return tensor.copy_(total)


def _check_tensor(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"tensor={tensor!r}: pass a tensor, torch.as_tensor(...)")


def _scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1 else x * factor


@eager
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return all ranks' tensors, joined along the first dimension in rank order.

    The gradient is this rank's rows of the average of the ranks' gradients.

    Args:
        tensor: of the same dtype on all ranks, and of the same shape but for the first dimension.
        name: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        UnsupportedError: its bytes cannot be sent, for instance because it is sparse.
    """
    comm, counts = communicator_of(process_set), list[int]()
    with comm.told():
        raw = bytes_of(tensor, "the tensor of allgather")
        if 0 in tensor.shape[1:]:
            raise UnsupportedError(f"allgather of {list(tensor.shape)}: rows need an element")
    shape = tensor.shape

    def gathered(x: torch.Tensor) -> torch.Tensor:
        rows = []
        for part in gather_bytes(
            raw, f"allgather of {x.dtype} rows of {list(shape[1:])}", process_set
        ):
            row = torch.empty(part.size // x.element_size(), dtype=x.dtype)
            row.view(torch.uint8).copy_(torch.from_numpy(part))
            rows.append(row.view(-1, *shape[1:]))
        counts.extend(map(len, rows))
        return torch.cat(rows).to(x.device)

    def gradient(of_result: torch.Tensor) -> torch.Tensor:
        mean = allreduce(of_result, process_set=process_set)
        return mean.split(counts)[process_set.rank()].view(shape)

    return _Differentiable.apply(tensor, gathered, gradient)


def bytes_of(tensor: Any, what: str) -> np.ndarray:
    """Return the bytes of a tensor, which are its memory if they are in host memory in order.

    Raises:
        UnsupportedError: it is no tensor, or has no memory of its own.
    """
    if kind := kind_without_bytes(tensor):
        raise UnsupportedError(
            f"cannot send {what}, {kind}: what can be pickled is sent by hvd.broadcast_object and "
            "hvd.allgather_object"
        )
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return host.view(-1).view(torch.uint8).numpy()


@eager
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite ``tensor`` by that of ``root_rank``, and return it.

    Autograd does not see it, as it does not see Horovod's.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: whose it becomes, among all ranks.
        name: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        UnsupportedError: its bytes cannot be sent, for instance because it is sparse.
    """
    comm = communicator_of(process_set)
    with comm.told():
        raw = bytes_of(tensor, "the tensor of broadcast")
    broadcast_bytes(raw, root_rank, f"{tensor.dtype}{list(tensor.shape)}", process_set)
    put_bytes(raw, tensor)
    return tensor


@torch.no_grad()
def put_bytes(raw: np.ndarray, tensor: torch.Tensor) -> None:
    """Undo :func:`bytes_of`."""
    host = torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)
    if host.data_ptr() != tensor.data_ptr():
        tensor.copy_(host)


@eager
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return what :func:`broadcast_` would make of ``tensor``, as a new tensor.

    The gradient is the average of the ranks' gradients on ``root_rank``, and zero elsewhere.

    Args:
        tensor, root_rank, name, process_set: as for :func:`broadcast_`, whose errors these are,
            too.
    """
    _check_tensor(tensor)

    def sent(x: torch.Tensor) -> torch.Tensor:
        return broadcast_(x.clone(), root_rank, name, process_set)

    def gradient(of_result: torch.Tensor) -> torch.Tensor:
        mean = allreduce(of_result, process_set=process_set)
        return mean * (rank() == root_rank)  # elsewhere a gradient of this one needs all ranks, too

    return _Differentiable.apply(tensor, sent, gradient)
