"""The mean of an array over the ranks, as one exchange: between steps, and of a graph's symbols."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Outcome
from hvd_compress.requests import Sum


def averaged(x: Array, size: Any) -> Generator[Sum, Any, Outcome]:
    """Average ``x`` over ``size`` ranks, in its own dtype."""
    total = yield Sum(x)
    return Outcome(backend_of(x).divided(total, size), x, {})
