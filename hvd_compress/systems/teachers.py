"""Codistillation: models that are trained at the same time teach each other.

Every rank, or every group of ranks, trains a model of its own, and an auxiliary loss draws its
predictions to those of the others.  No gradient travels between them: either predictions do, on
batches that all see, or the models themselves do, rarely.

Nothing here knows a framework: who exchanges what and when, messages, schedules, and losses in
NumPy.
"""

from hvd_compress.systems.codistillation import Codistillation, Ramp, WeightDecay
from hvd_compress.systems.codistiller import Codistiller
from hvd_compress.systems.counterparts import Counterparts
from hvd_compress.systems.distillation import LOSSES

__all__ = [
    "LOSSES",
    "Codistillation",
    "Codistiller",
    "Counterparts",
    "Ramp",
    "WeightDecay",
]
