"""The names that every drop-in adds to Horovod's: methods, schedules, errors, statistics.

The building blocks are not among them, since ``hvd.allreduce`` and ``hvd.allgather`` are Horovod's.
"""

from hvd_compress import errors, methods
from hvd_compress.base import Compressor
from hvd_compress.errors import *  # noqa: F403, errors.__all__ is the list
from hvd_compress.integrations.logs import log_stats
from hvd_compress.methods import *  # noqa: F403, methods.__all__ is the list
from hvd_compress.schedules import After, ExponentialWarmup, StagedWarmup, warmup_to

__all__ = ["After", "Compressor", "ExponentialWarmup", "StagedWarmup", "log_stats", "warmup_to"]
__all__ += errors.__all__
__all__ += methods.__all__

#: training methods and what belongs to them, which drop-ins import when they are asked for
SYSTEMS = (
    *("Codistillation", "Ramp", "WeightDecay"),
    *("DiLoCo", "EASGD", "LeaderSGD", "LocalSGD", "SparseLoCo"),
    *("DGD", "Diffusion", "EXTRA", "ExactDiffusion"),
    *("GradientTracking", "LEAD"),
)
