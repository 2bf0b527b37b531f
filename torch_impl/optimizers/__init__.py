"""Optimizers and helpers for large batches; formulas: ``hvd_compress.training.large_batch``."""

from .layerwise import LAMB, LARS
from .sharpness import ASAM, SAM
from .warmup import scaled_warmup

__all__ = ["ASAM", "LAMB", "LARS", "SAM", "scaled_warmup"]
