"""Callbacks for ``model.fit`` over MPI."""

from ...mpi import collectives
from .. import callbacks
from ..callbacks import BestModelCheckpoint, CompressionCallback, LearningRateScheduleCallback

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CompressionCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariablesCallback):
    _hvd = collectives


class MetricAverageCallback(callbacks.MetricAverageCallback):
    _hvd = collectives


class LearningRateWarmupCallback(callbacks.LearningRateWarmupCallback):
    _hvd = collectives
