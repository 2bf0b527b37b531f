"""Gradient compression for Horovod and MPI: the core, which needs nothing but NumPy.

The frameworks have packages of their own: ``hvd_compress.torch``.
"""

from importlib.metadata import PackageNotFoundError, version

from hvd_compress.aggregators import allgather, allreduce, power_sgd
from hvd_compress.base import (
    Compressor,
    Context,
    Gather,
    Max,
    Outcome,
    Sparse,
    Sum,
)
from hvd_compress.chain import Chain, Transform, chain
from hvd_compress.config import from_config
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
from hvd_compress.operators import random_k, top_k
from hvd_compress.schedules import (
    PAPER_DENSITIES,
    After,
    ExponentialWarmup,
    StagedWarmup,
    warmup_to,
)
from hvd_compress.transforms import (
    clip_by_local_norm,
    error_feedback,
    momentum_after_averaging,
    momentum_correction,
)

try:
    __version__ = version("hvd_compress")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "PAPER_DENSITIES",
    "After",
    "Chain",
    "CompressionError",
    "Compressor",
    "ConfigError",
    "Context",
    "ExponentialWarmup",
    "Gather",
    "Max",
    "NoCompression",
    "Outcome",
    "PayloadError",
    "PowerSGD",
    "RandomK",
    "SetupError",
    "Sparse",
    "StagedWarmup",
    "Sum",
    "TopK",
    "Transform",
    "UnboundError",
    "UnsupportedError",
    "allgather",
    "allreduce",
    "as_compressor",
    "chain",
    "clip_by_local_norm",
    "error_feedback",
    "from_config",
    "momentum_after_averaging",
    "momentum_correction",
    "power_sgd",
    "random_k",
    "top_k",
    "warmup_to",
]
