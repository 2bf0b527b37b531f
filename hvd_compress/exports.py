"""What every drop-in has beside Horovod's own names: methods, schedules, errors.

Not the building blocks: ``hvd.allreduce`` and ``hvd.allgather`` are Horovod's.
"""

from hvd_compress.base import Compressor
from hvd_compress.errors import (
    CompressionError,
    ConfigError,
    PayloadError,
    SetupError,
    UnboundError,
    UnsupportedError,
)
from hvd_compress.methods import (
    BF16,
    DGC,
    FP16,
    NoCompression,
    PowerSGD,
    RandomK,
    TopK,
    as_compressor,
)
from hvd_compress.schedules import After, ExponentialWarmup, StagedWarmup, warmup_to

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "After",
    "CompressionError",
    "Compressor",
    "ConfigError",
    "ExponentialWarmup",
    "NoCompression",
    "PayloadError",
    "PowerSGD",
    "RandomK",
    "SetupError",
    "StagedWarmup",
    "TopK",
    "UnboundError",
    "UnsupportedError",
    "as_compressor",
    "warmup_to",
]
