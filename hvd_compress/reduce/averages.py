"""The mean of an array over the ranks, and the largest values, as one exchange each: between steps,
and of a graph's symbols."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Outcome
from hvd_compress.requests import Max, Sum


def averaged(x: Array, size: Any) -> Generator[Sum, Any, Outcome]:
    """Average ``x`` over ``size`` ranks, in its own dtype."""
    total = yield Sum(x)
    return Outcome(backend_of(x).divided(total, size), x, {})


def largest(x: np.ndarray, like: Array) -> Generator[Max, Any, np.ndarray]:
    """Return the largest of each element over the ranks, by messages like ``like``."""
    xp = backend_of(like)
    most: np.ndarray = xp.to_numpy((yield Max(xp.from_numpy(x, like))))
    return most
