"""Optimizers: formulas over the arrays of any framework, one a file, and learning rates.

In PyTorch they are optimizers of ``hvd_compress.torch``, in Keras 3 of
``hvd_compress.tensorflow.keras``, by the same names; with NumPy they are called as
:mod:`hvd_compress.optimizers.base` shows.
"""

from hvd_compress.optimizers.base import Formula, Now, Slot
from hvd_compress.optimizers.lamb import LAMB
from hvd_compress.optimizers.lars import LARS
from hvd_compress.optimizers.onebit_adam import OneBitAdam
from hvd_compress.optimizers.onebit_lamb import OneBitLAMB
from hvd_compress.optimizers.outer import OuterSGD
from hvd_compress.optimizers.scaling import SCALINGS, rate_factor, warmed_up
from hvd_compress.optimizers.sharpness import SAM
from hvd_compress.optimizers.zero_one_adam import ZeroOneAdam

__all__ = [
    "LAMB",
    "LARS",
    "SAM",
    "SCALINGS",
    "Formula",
    "Now",
    "OneBitAdam",
    "OneBitLAMB",
    "OuterSGD",
    "Slot",
    "ZeroOneAdam",
    "rate_factor",
    "warmed_up",
]
