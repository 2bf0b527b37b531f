"""The names that every drop-in adds to Horovod's: methods, schedules, errors.

The building blocks are not among them, since ``hvd.allreduce`` and ``hvd.allgather`` are Horovod's.
"""

from hvd_compress import methods
from hvd_compress.base import Compressor
from hvd_compress.errors import (
    CompressionError,
    ConfigError,
    NeedsTuning,
    PayloadError,
    PoorFit,
    SetupError,
    UnboundError,
    UnsupportedError,
)
from hvd_compress.methods import *  # noqa: F403, methods.__all__ is the list
from hvd_compress.schedules import After, ExponentialWarmup, StagedWarmup, warmup_to

__all__ = [
    "After",
    "CompressionError",
    "Compressor",
    "ConfigError",
    "ExponentialWarmup",
    "NeedsTuning",
    "PayloadError",
    "PoorFit",
    "SetupError",
    "StagedWarmup",
    "UnboundError",
    "UnsupportedError",
    "warmup_to",
]
__all__ += methods.__all__
