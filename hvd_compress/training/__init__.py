"""Training with local steps between exchanges: methods, their owner on a rank, and all ranks in one
process."""

from hvd_compress.training.base import (
    Finish,
    Mean,
    Start,
    StepContext,
    TrainingMethod,
)
from hvd_compress.training.coordinator import Coordinator
from hvd_compress.training.diloco import DiLoCo
from hvd_compress.training.local_sgd import LocalSGD
from hvd_compress.training.outer import OuterSGD
from hvd_compress.training.slowmo import SlowMo
from hvd_compress.training.world import World

__all__ = [
    "Coordinator",
    "DiLoCo",
    "Finish",
    "LocalSGD",
    "Mean",
    "OuterSGD",
    "SlowMo",
    "Start",
    "StepContext",
    "TrainingMethod",
    "World",
]
