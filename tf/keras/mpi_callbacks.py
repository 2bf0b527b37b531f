"""Callbacks for ``model.fit`` over MPI; users find them as ``mpi.callbacks``."""

from __future__ import annotations

from typing import Any

from ..mpi import collectives
from . import callbacks
from .callbacks import BestModelCheckpoint, CompressionCallback, LearningRateScheduleCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CompressionCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


def _over_mpi(callback: type) -> Any:
    """Return the class of a callback with collectives over MPI instead of Horovod's."""
    own = {"_hvd": collectives, "__module__": __name__}
    return type(callback.__name__, (callback,), own)


BroadcastGlobalVariablesCallback = _over_mpi(callbacks.BroadcastGlobalVariablesCallback)
LearningRateWarmupCallback = _over_mpi(callbacks.LearningRateWarmupCallback)
MetricAverageCallback = _over_mpi(callbacks.MetricAverageCallback)
