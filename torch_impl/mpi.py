"""Training with PyTorch over MPI alone, without Horovod::

    import hvd_compress.torch.mpi as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=..., compression=hvd.DGC)

then ``mpirun -np 16 python train.py``.  Functions and options are those of ``horovod.torch``, so a
script changes one line.  Gradients leave in buckets while backward goes on, sums are added in rank
order and every run has the same bits; see :mod:`hvd_compress.mpi.engine`.
"""

from __future__ import annotations

import pickle
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from hvd_compress import mpi
from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError, MismatchError, SetupError, UnsupportedError
from hvd_compress.integrations.horovod import without_state
from hvd_compress.methods import FP16, NoCompression
from hvd_compress.mpi.dense.allgather import allgather as gather_bytes
from hvd_compress.mpi.dense.allreduce import ALGORITHMS, start
from hvd_compress.mpi.transport.arrays import flatten
from hvd_compress.mpi.transport.progress import Message, Wait

from . import *  # noqa: F403
from . import __all__ as _methods
from . import checkpoint
from .amp import watch_grad_scaler
from .distributed_optimizer import (
    CompressedOptimizer,
    broadcast_state,
    wrap_factory,
)
from .gradient_hooks import GradientHooks

__all__ = [
    *_methods,
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]

Average, Sum, Max, Adasum = "mean", "sum", "max", "adasum"


class Compression:
    """Horovod's names for what needs no state; instances, so that a script that says ``none`` can
    be told from one that names ``NoCompression``."""

    none = NoCompression()
    fp16 = FP16()


class ProcessSet:
    """Ranks that work together; of all of them only those that belong to it may use it."""

    def __init__(self, ranks: Sequence[int] | None) -> None:
        self.ranks = None if ranks is None else sorted(ranks)
        self.comm: mpi.Communicator | None = None

    def included(self) -> bool:
        return self.comm is not None

    def rank(self) -> int:
        return self._needed().rank

    def size(self) -> int:
        return self._needed().size

    def _needed(self) -> mpi.Communicator:
        if self.comm is None:
            raise SetupError(
                "call hvd.init() first"
                if self is global_process_set
                else f"this rank is not in the process set {self.ranks}"
            )
        return self.comm


global_process_set = ProcessSet(None)
_node: list[mpi.Communicator] = []


def init(comm: MPI.Comm | None = None) -> None:
    """Begin; every rank calls it, once or more often.

    Args:
        comm: the ranks that train together; ``None`` for all.
    """
    if global_process_set.comm is None:
        global_process_set.comm = mpi.Communicator(comm)
        ranks = global_process_set.comm
        _node.append(mpi.Communicator(ranks.mpi.Split_type(MPI.COMM_TYPE_SHARED)))


def shutdown() -> None:
    """Give communicators back; ``init`` may be called again."""
    for comm in [global_process_set.comm, *_node]:
        if comm is not None:
            comm.free()
    global_process_set.comm = None
    _node.clear()


def is_initialized() -> bool:
    return global_process_set.included()


def rank() -> int:
    return global_process_set.rank()


def size() -> int:
    return global_process_set.size()


def local_rank() -> int:
    """Number of this rank on its node."""
    global_process_set._needed()
    return _node[0].rank


def local_size() -> int:
    """Ranks on this node."""
    global_process_set._needed()
    return _node[0].size


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks usable; every rank calls it."""
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    everyone = global_process_set._needed()
    members = list(range(everyone.size)) if found.ranks is None else found.ranks
    if bad := [r for r in members if not 0 <= r < everyone.size]:
        raise ConfigError(
            f"process set with rank {bad[0]}: there are ranks 0 to {everyone.size - 1}"
        )
    color = 0 if everyone.rank in members else MPI.UNDEFINED
    part = everyone.mpi.Split(color, everyone.rank)
    if part != MPI.COMM_NULL:
        found.comm = mpi.Communicator(part)
        part.Free()
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Every rank calls it."""
    if process_set.comm is not None:
        process_set.comm.free()
        process_set.comm = None
    return True


# -- collectives on tensors -------------------------------------------------------------------


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
    """Begin an allreduce; :func:`synchronize` returns its result."""
    comm, op = process_set._needed(), _checked(op, average)
    flat = flatten(tensor)
    call = f"allreduce({name or flat.dtype}{list(flat.shape)}, {op})"
    comm.agree(call)
    out = flat.array.copy() if isinstance(flat.array, np.ndarray) else flat.array.clone()
    work = start(comm, call, ALGORITHMS["direct"], flat, out, op)
    return _Handle(work, lambda: flat.give_back(out))


def synchronize(handle: _Handle) -> torch.Tensor:
    """The result of what ``handle`` began."""
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
    """The average, sum or maximum over the ranks; a new tensor."""
    dtype = tensor.dtype
    if without_state(compression) == "fp16" and tensor.is_floating_point():
        tensor = tensor.half()
    if prescale_factor != 1:
        tensor = tensor * prescale_factor
    result = mpi.allreduce(tensor, op=_checked(op, average), comm=process_set._needed())
    return (result * postscale_factor if postscale_factor != 1 else result).to(dtype)


def allreduce_(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """:func:`allreduce` in place."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, *args, **options))


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
    """All ranks' tensors one after the other along the first dimension, which may differ."""
    comm = process_set._needed()
    kind = f"allgather of {tensor.dtype} rows of {list(tensor.shape[1:])}"
    head = np.array([zlib.crc32(kind.encode())], "<u4").view(np.uint8)
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    messages = gather_bytes(np.concatenate([head, raw]), comm=comm)
    if any((message[:4] != head).any() for message in messages):
        raise MismatchError(f"ranks gather rows of different dtype or shape; here it is {kind}")
    parts = [message[4:] for message in messages]
    rows = []
    for part in parts:
        row = torch.empty(part.size // tensor.element_size(), dtype=tensor.dtype)
        row.view(torch.uint8).copy_(torch.from_numpy(part))
        rows.append(row.view(-1, *tensor.shape[1:]))
    return torch.cat(rows).to(tensor.device)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's object, in rank order."""
    raw = np.frombuffer(pickle.dumps(obj), np.uint8)
    parts = gather_bytes(raw, comm=global_process_set._needed())
    return [pickle.loads(part.tobytes()) for part in parts]


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of ``root_rank`` for all, in place."""
    comm = process_set._needed()
    members = range(comm.size) if process_set.ranks is None else process_set.ranks
    if root_rank not in members:
        raise ConfigError(f"root_rank={root_rank} is not one of the ranks {list(members)}")
    root = list(members).index(root_rank)
    with torch.no_grad():
        host = tensor.detach().cpu().contiguous()
        comm.agree(f"broadcast({host.dtype}{list(host.shape)}, root {root_rank})")
        comm.run("broadcast", _broadcast(comm, host.view(-1).view(torch.uint8).numpy(), root))
        if host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)
    return tensor


def broadcast(tensor: torch.Tensor, root_rank: int, *args: Any, **options: Any) -> torch.Tensor:
    """:func:`broadcast_` into a new tensor."""
    return broadcast_(tensor.detach().clone(), root_rank, *args, **options)


def _broadcast(comm: mpi.Communicator, raw: np.ndarray, root_rank: int) -> Any:
    """MPI's own, in pieces that its counts can express."""
    for first in range(0, raw.size, 2**30):
        request = comm.mpi.Ibcast(raw[first : first + 2**30], root_rank)
        yield Wait([Message.collective(request)], "MPI_Ibcast")


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """What ``root_rank`` has, on all ranks."""
    raw = torch.empty(0, dtype=torch.uint8)
    if rank() == root_rank:
        raw = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    length = broadcast(torch.tensor([raw.numel()]), root_rank)
    if rank() != root_rank:
        raw = torch.empty(int(length), dtype=torch.uint8)
    return pickle.loads(broadcast(raw, root_rank).numpy().tobytes())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """All ranks come here before any goes on."""
    comm = process_set._needed()
    request = comm.mpi.Ibarrier()
    comm.run("barrier", iter([Wait([Message.collective(request)], "MPI_Ibarrier")]))


def broadcast_parameters(parameters: Any, root_rank: int) -> None:
    """``model.state_dict()`` or ``model.named_parameters()`` of ``root_rank`` for all."""
    named = parameters.items() if isinstance(parameters, dict) else parameters
    for _, tensor in sorted(named, key=lambda pair: pair[0]):
        if isinstance(tensor, torch.Tensor):
            broadcast_(tensor.data, root_rank)


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """The state of ``root_rank``'s optimizer for all; of what differs by rank, the mean.  What has
    no gradient yet gets zeros, sparse ones for such embeddings of ``model``."""
    this = sys.modules[__name__]
    if isinstance(optimizer, CompressedOptimizer):
        broadcast_state(optimizer, root_rank, model)
    else:
        state = optimizer.state_dict() if rank() == root_rank else None
        optimizer.load_state_dict(checkpoint.broadcast_tree(this, state, root_rank))


_ONLY_WITH_HOROVOD = {
    *("join", "elastic", "SyncBatchNorm", "Min", "Product", "poll", "cross_rank", "cross_size"),
    *("allreduce_async_", "allgather_async", "broadcast_async", "broadcast_async_"),
    *("start_timeline", "stop_timeline", "is_homogeneous"),
}
_FAMILIES_ONLY_WITH_HOROVOD = ("grouped_", "sparse_", "alltoall", "reducescatter")


def __getattr__(name: str) -> Any:
    if name in _ONLY_WITH_HOROVOD or name.startswith(_FAMILIES_ONLY_WITH_HOROVOD):
        raise UnsupportedError(f"hvd.{name} needs Horovod: import hvd_compress.torch as hvd")
    raise AttributeError(f"hvd_compress.torch.mpi has no {name!r}")


# -- the optimizer ----------------------------------------------------------------------------


def _make_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Compressor | type[Compressor] | str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer whose ``step()`` works on the gradients of all ranks.

    Args:
        optimizer: over the model's parameters, of any class but LBFGS.
        named_parameters: ``model.named_parameters()``; names appear in statistics.
        compression: a method such as ``hvd.DGC``, an instance, its name, or a text.
        backward_passes_per_step: gradients of so many passes add up before they are exchanged.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: divide by it before adding and by the rest afterwards.
        num_groups, groups: parameters that travel together: a number of groups, or lists.
        sparse_as_dense: make sparse gradients dense before they are exchanged.
        process_set: the ranks that take part.

    And ``seed``, for randomness that the ranks share.
    """
    if process_set is global_process_set:
        process_set._needed()
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ConfigError("gradient_predivide_factor needs op=hvd.Average")
    cls: Any = type(type(optimizer).__name__, (type(optimizer), GradientHooks), {})
    distributed = cls.__new__(cls)
    # Options and state go on.  A scheduler that was made before has put its own step() in the way.
    distributed.__dict__.update(
        {key: value for key, value in vars(optimizer).items() if not hasattr(type(optimizer), key)}
    )
    distributed._set_up(
        named_parameters,
        backward_passes_per_step,
        gradient_predivide_factor,
        groups if groups is not None else num_groups or None,
        sparse_as_dense,
        process_set,
    )
    return distributed


def _make_engine(_: Any, process_set: ProcessSet, predivide: float) -> mpi.MpiEngine:
    """Ranks outside of the set have a world of their own, where nothing is exchanged."""
    if not process_set.included():
        return mpi.MpiEngine(MPI.COMM_SELF)
    return mpi.MpiEngine(process_set.comm, predivide=predivide)


DistributedOptimizer = wrap_factory(sys.modules[__name__], _make_optimizer, _make_engine)
watch_grad_scaler()
