"""TensorFlow over MPI alone, without Horovod::

    import hvd_compress.tensorflow.mpi as hvd

    hvd.init()
    tape = hvd.DistributedGradientTape(tape, compression=hvd.DGC(momentum=0.9))

then ``mpirun -np 16 python train.py``.  Functions and options are those of ``horovod.tensorflow``,
so a script changes one line.  For Keras see ``hvd_compress.tensorflow.keras.mpi``.

Messages are sent from host memory, and sums are added in rank order, so every run has the same
bits.
"""

from __future__ import annotations

from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.integrations.exports import *  # noqa: F403
from hvd_compress.integrations.exports import __all__ as _methods
from hvd_compress.integrations.horovod import check_server
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

from .collectives import (
    Adasum,
    Average,
    Compression,
    Max,
    Sum,
    allgather,
    allgather_object,
    barrier,
    broadcast,
    broadcast_object,
    broadcast_variables,
)
from .training import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
    allreduce,
    bind,
    grouped_allreduce,
)

__all__ = [
    *_methods,
    "Adasum",
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "bind",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]

_ONLY_WITH_HOROVOD = {
    *("join", "elastic", "SyncBatchNormalization", "Min", "Product", "grouped_allgather"),
    *("BroadcastGlobalVariablesHook", "broadcast_", "broadcast_global_variables", "cross_rank"),
    *("cross_size", "start_timeline", "stop_timeline", "is_homogeneous", "rank_op", "size_op"),
}
_FAMILIES_ONLY_WITH_HOROVOD = ("alltoall", "reducescatter", "grouped_reducescatter")


def missing(name: str, module: str, with_horovod: str) -> Exception:
    """Return the error for a name that ``module`` has not."""
    check_server(name)
    if name in _ONLY_WITH_HOROVOD or name.startswith(_FAMILIES_ONLY_WITH_HOROVOD):
        return UnsupportedError(f"hvd.{name} needs Horovod: import {with_horovod} as hvd")
    return AttributeError(f"{module} has no {name!r}")


def __getattr__(name: str) -> Any:
    raise missing(name, __name__, "hvd_compress.tensorflow")


def __dir__() -> list[str]:
    return sorted(__all__)
