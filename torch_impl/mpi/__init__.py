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

from hvd_compress.integrations.mpi import *  # noqa: F403
from hvd_compress.integrations.mpi import __all__ as _names
from hvd_compress.integrations.mpi import missing

from .. import *  # noqa: F403
from .. import __all__ as _methods
from . import collectives
from .collectives import *  # noqa: F403
from .optimizer import (
    SYSTEMS,
    DistributedOptimizer,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from .servers import AsynchronousLeaderSGD, parameter_server

globals().update(SYSTEMS)

__all__ = [
    *_methods,
    *_names,
    *collectives.__all__,
    "AsynchronousLeaderSGD",
    "DistributedOptimizer",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "parameter_server",
]


def __getattr__(name: str) -> Any:
    raise missing(name, __name__)


__dir__ = __all__.copy
