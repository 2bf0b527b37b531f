"""Optimizers and helpers for large batches; formulas: ``hvd_compress.training.large_batch``."""

from .layerwise import LAMB, LARS
from .noise_scale import GradientNoiseScale
from .sharpness import ASAM, SAM
from .warmup import scaled_warmup

__all__ = ["ASAM", "LAMB", "LARS", "SAM", "GradientNoiseScale", "scaled_warmup"]
