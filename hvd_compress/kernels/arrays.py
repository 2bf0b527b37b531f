"""What goes into the loops over a bucket, and what comes out of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = Any


class Step(NamedTuple):
    """The arrays of one tensor in one step, all 1-D, float32, contiguous and of the same size: what
    is read, and where the new state is written.  Without momentum there are no velocities."""

    gradient: Array
    residual: Array
    new_residual: Array
    velocity: Array = None
    new_velocity: Array = None


class Selected(NamedTuple):
    """The selected elements of all tensors of a bucket.

    Attributes:
        indices: ascending, into all tensors end to end (int64).
        values: float32.
        finite: for each tensor whether all its elements are finite (bool).
    """

    indices: np.ndarray
    values: np.ndarray
    finite: np.ndarray
