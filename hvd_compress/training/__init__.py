"""Ways to train with fewer exchanges, and with large batches.

Here is training with local steps between exchanges: the methods, their owner on a rank, and all
ranks in one process.  ``large_batch`` is a package of its own.
"""

from hvd_compress.optimizers.outer import OuterSGD
from hvd_compress.training.base import (
    Finish,
    Mean,
    Start,
    StepContext,
    TrainingMethod,
)
from hvd_compress.training.codistillation import (
    Codistillation,
    Codistiller,
    CoordinatedSampler,
    Decay,
    Ramp,
    WeightDecay,
)
from hvd_compress.training.coordinator import Coordinator
from hvd_compress.training.diloco import DiLoCo
from hvd_compress.training.easgd import EAMSGD, EASGD
from hvd_compress.training.leader_sgd import LeaderSGD
from hvd_compress.training.local_sgd import LocalSGD
from hvd_compress.training.slowmo import SlowMo
from hvd_compress.training.world import World

__all__ = [
    "EAMSGD",
    "EASGD",
    "Codistillation",
    "Codistiller",
    "CoordinatedSampler",
    "Coordinator",
    "Decay",
    "DiLoCo",
    "Finish",
    "LeaderSGD",
    "LocalSGD",
    "Mean",
    "OuterSGD",
    "Ramp",
    "SlowMo",
    "Start",
    "StepContext",
    "TrainingMethod",
    "WeightDecay",
    "World",
]
