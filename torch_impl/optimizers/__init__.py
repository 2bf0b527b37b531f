"""``DistributedOptimizer``, optimizers with local steps, and those of
:mod:`hvd_compress.optimizers`."""

from .plain import LAMB, LARS, OneBitAdam, OneBitLAMB
from .sharpness import SAM
from .warmup import scaled_warmup
from .zero_one_adam import ZeroOneAdam

__all__ = [
    "LAMB",
    "LARS",
    "SAM",
    "OneBitAdam",
    "OneBitLAMB",
    "ZeroOneAdam",
    "scaled_warmup",
]
