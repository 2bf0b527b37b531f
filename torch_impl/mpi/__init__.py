"""Training with PyTorch over MPI alone, without Horovod::

    import hvd_compress.torch.mpi as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=..., compression=hvd.DGC)

then ``mpirun -np 16 python train.py``.  Functions and options are those of ``horovod.torch``, so a
script changes one line.  Gradients are sent in buckets while backward goes on, and sums are added
in rank order, so every run has the same bits; see :mod:`hvd_compress.mpi.engine`.
"""

from __future__ import annotations

from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.mpi.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)

from .. import *  # noqa: F403
from .. import __all__ as _methods
from ..systems.averaging import averaging
from . import collectives
from .asynchronous import AsynchronousEASGD, AsynchronousLeaderSGD
from .collectives import (
    Adasum,
    Average,
    Compression,
    Max,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    synchronize,
)
from .optimizer import (
    SYSTEMS,
    DistributedOptimizer,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from .parameter_server import parameter_server

average_parameters = averaging(collectives, __name__)
globals().update(SYSTEMS)

__all__ = [
    *_methods,
    "Adasum",
    "AsynchronousEASGD",
    "AsynchronousLeaderSGD",
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
    "parameter_server",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "synchronize",
]

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


def __dir__() -> list[str]:
    return sorted(__all__)
