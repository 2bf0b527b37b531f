"""Horovod's functions on single tensors and objects, over MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvd_compress import mpi
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.horovod import without_state
from hvd_compress.methods import FP16, NoCompression
from hvd_compress.mpi.dense import ALGORITHMS
from hvd_compress.mpi.dense.running import start
from hvd_compress.mpi.objects import allgather_object as allgather_object
from hvd_compress.mpi.objects import barrier as barrier
from hvd_compress.mpi.objects import broadcast_bytes, gather_bytes
from hvd_compress.mpi.objects import broadcast_object as broadcast_object
from hvd_compress.mpi.process_sets import ProcessSet, communicator_of, global_process_set
from hvd_compress.mpi.process_sets import rank as rank
from hvd_compress.mpi.transport.arrays import flatten

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


class _Handle:
    def __init__(self, work: Any, finish: Callable[[], torch.Tensor]) -> None:
        self.work, self.finish = work, finish


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> _Handle:
    """Begin :func:`allreduce` and return a handle for :func:`synchronize`; does not wait.

    Args:
        tensor, average, name, op, process_set: as for :func:`allreduce`, whose errors these are,
            too.
    """
    comm, op = communicator_of(process_set), _checked(op, average)
    flat = flatten(tensor)
    call = f"allreduce({name or flat.dtype}{list(flat.shape)}, {op})"
    comm.agree(call)
    out = flat.array.copy() if isinstance(flat.array, np.ndarray) else flat.array.clone()
    work = start(comm, call, ALGORITHMS["direct"], flat, out, op)
    return _Handle(work, lambda: flat.give_back(out))


def synchronize(handle: _Handle) -> torch.Tensor:
    """Wait for the operation that ``handle`` stands for, and return its result."""
    handle.work.wait()
    return handle.finish()


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

    Args:
        tensor: of the same shape and dtype on all ranks, floats or integers.
        average: older than ``op``: ``False`` means ``op=hvd.Sum``.
        name: shown in error messages.
        compression: ``hvd.FP16`` or ``hvd.Compression.fp16`` sends half precision.
        op: ``hvd.Average``, ``hvd.Sum`` or ``hvd.Max``.
        prescale_factor, postscale_factor: multiply before and after.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the ranks' tensors or options differ.
        UnboundError: the compression is one that needs an optimizer.
        UnsupportedError: another ``op``, or a dtype that cannot be added.
    """
    dtype = tensor.dtype
    if without_state(compression) == "fp16" and tensor.is_floating_point():
        tensor = tensor.half()
    if prescale_factor != 1:
        tensor = tensor * prescale_factor
    result = mpi.allreduce(tensor, op=_checked(op, average), comm=communicator_of(process_set))
    return (result * postscale_factor if postscale_factor != 1 else result).to(dtype)


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

    Args:
        tensor, average, name, op, prescale_factor, postscale_factor, process_set, compression: as
            for :func:`allreduce`, whose errors these are, too; in the order of Horovod's
            ``allreduce_``, which has no ``compression``.
    """
    factors = prescale_factor, postscale_factor
    with torch.no_grad():
        total = allreduce(tensor, average, name, compression, op, *factors, process_set)
        return tensor.copy_(total)


def _checked(op: str | None, average: Any) -> str:
    if not isinstance(average, bool | None):
        raise ConfigError(f"average={average!r}: True, False, or write op=; names go to name=")
    if op is None:
        op = Sum if average is False else Average
    if op not in (Average, Sum, Max):
        raise UnsupportedError(f"op={op!r}: over MPI there are hvd.Average, hvd.Sum and hvd.Max")
    return op


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return all ranks' tensors, joined along the first dimension in rank order.

    Args:
        tensor: of the same dtype on all ranks, and of the same shape but for the first dimension.
        name: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        MismatchError: the ranks' rows differ in dtype or shape.
    """
    kind = f"allgather of {tensor.dtype} rows of {list(tensor.shape[1:])}"
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    rows = []
    for part in gather_bytes(raw, kind, process_set):
        row = torch.empty(part.size // tensor.element_size(), dtype=tensor.dtype)
        row.view(torch.uint8).copy_(torch.from_numpy(part))
        rows.append(row.view(-1, *tensor.shape[1:]))
    return torch.cat(rows).to(tensor.device)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite ``tensor`` by that of ``root_rank``, and return it.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: whose it becomes, among all ranks.
        name: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        ConfigError: the root is not one of them.
        MismatchError: the ranks' tensors differ in shape or dtype.
    """
    with torch.no_grad():
        host = tensor.detach().cpu().contiguous()
        what = f"{host.dtype}{list(host.shape)}"
        broadcast_bytes(host.view(-1).view(torch.uint8).numpy(), root_rank, what, process_set)
        if host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)
    return tensor


def broadcast(tensor: torch.Tensor, root_rank: int, *args: Any, **options: Any) -> torch.Tensor:
    """Return what :func:`broadcast_` would make of ``tensor``, as a new tensor.

    Args:
        tensor, root_rank: as for :func:`broadcast_`, whose errors these are, too.
        args, options: its ``name`` and ``process_set``.
    """
    return broadcast_(tensor.detach().clone(), root_rank, *args, **options)
