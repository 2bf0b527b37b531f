"""Training with large batches: formulas in NumPy, which the optimizers of the bindings follow.

PyTorch: ``hvd.LARS``, ``hvd.LAMB``, ``hvd.SAM``, ``hvd.ASAM``, ``hvd.scaled_warmup`` of
``hvd_compress.torch``.  Keras 3: ``hvd.LARS``, ``hvd.LAMB``,
``hvd.SAM``, ``hvd.ASAM``, ``hvd.ScaledWarmup`` of ``hvd_compress.tensorflow.keras``.
"""

from .layerwise import lamb_step, lars_step
from .scaling import SCALINGS, rate_factor, warmed_up
from .sharpness import adaptive_ascent, ascent

__all__ = [
    "SCALINGS",
    "adaptive_ascent",
    "ascent",
    "lamb_step",
    "lars_step",
    "rate_factor",
    "warmed_up",
]
