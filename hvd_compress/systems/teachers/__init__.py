"""Codistillation: models that are trained at the same time teach each other.

Every rank, or every group of ranks, trains a model of its own, and an auxiliary loss draws its
predictions to those of the others.  No gradient travels between them: either predictions do, on
batches that all see, or the models themselves do, rarely.

Nothing here knows a framework: who exchanges what and when, messages, schedules, and losses in
NumPy.
"""

from hvd_compress.systems.teachers.codistiller import Codistiller
from hvd_compress.systems.teachers.exchanges import Counterparts
from hvd_compress.systems.teachers.losses import LOSSES
from hvd_compress.systems.teachers.method import Codistillation, Ramp, WeightDecay

__all__ = [
    "LOSSES",
    "Codistillation",
    "Codistiller",
    "Counterparts",
    "Ramp",
    "WeightDecay",
]
