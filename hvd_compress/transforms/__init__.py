"""Local steps before and after an exchange, one file each; the contract is ``chain.Transform``."""

from hvd_compress.transforms.averaged_momentum import averaged_momentum
from hvd_compress.transforms.averaging import moving_average, smoothing
from hvd_compress.transforms.clipping import clip_by_local_norm
from hvd_compress.transforms.ef21 import ef21
from hvd_compress.transforms.error_feedback import error_feedback
from hvd_compress.transforms.fading_memory import fading_memory
from hvd_compress.transforms.majority_vote import majority_vote
from hvd_compress.transforms.momentum import momentum_after_averaging, momentum_correction
from hvd_compress.transforms.momentum_feedback import momentum_feedback

__all__ = [
    "averaged_momentum",
    "clip_by_local_norm",
    "ef21",
    "error_feedback",
    "fading_memory",
    "majority_vote",
    "momentum_after_averaging",
    "momentum_correction",
    "momentum_feedback",
    "moving_average",
    "smoothing",
]
