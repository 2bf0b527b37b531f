"""Local steps before and after an exchange; the contract is ``chain.Transform``."""

from hvd_compress.transforms.clipping import clip_by_local_norm
from hvd_compress.transforms.ef21 import ef21
from hvd_compress.transforms.feedback import error_feedback, fading_memory, momentum_feedback
from hvd_compress.transforms.majority_vote import majority_vote
from hvd_compress.transforms.momentum import (
    averaged_momentum,
    momentum_after_averaging,
    momentum_correction,
    moving_average,
    smoothing,
)

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
