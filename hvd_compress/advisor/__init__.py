"""Is compression worth it here?  A model of the time of a step, from measured pieces."""

from hvd_compress.advisor.advice import (
    CANDIDATES,
    Candidate,
    Step,
    allowed,
    average_step,
    break_even,
    choose,
    is_bottleneck,
    rows_of,
    step_of,
)
from hvd_compress.advisor.losses import OPTIMIZERS, RECIPES, MeasuredLoss, loss_of
from hvd_compress.advisor.network import Network
from hvd_compress.advisor.pieces import Piece, kept, measured
from hvd_compress.advisor.shapes import MODELS, Shapes

__all__ = [
    "CANDIDATES",
    "MODELS",
    "OPTIMIZERS",
    "RECIPES",
    "Candidate",
    "MeasuredLoss",
    "Network",
    "Piece",
    "Shapes",
    "Step",
    "allowed",
    "average_step",
    "break_even",
    "choose",
    "is_bottleneck",
    "kept",
    "loss_of",
    "measured",
    "rows_of",
    "step_of",
]
