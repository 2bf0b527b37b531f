"""Select exactly k large elements without sorting (Shi et al., MLSys 2021)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hvd_compress.base import Context
from hvd_compress.config import check_choice
from hvd_compress.operators.on_host import HostSelector
from hvd_compress.operators.random_k import own_generator
from hvd_compress.operators.top_k import count
from hvd_compress.schedules import density_at


@dataclasses.dataclass(frozen=True)
class ms_top_k(HostSelector, name="ms_top_k"):
    """k = ceil(density * n) elements: all beyond a threshold, and of those just below it a random
    run, of elements that follow each other, as long as needed.

    Halving an interval finds two thresholds, one that at most k elements reach and one that more
    do.  It begins between the mean and the largest magnitude, as in the paper, or below the mean
    where fewer than k elements are above that.  The random numbers depend on seed, step, tensor
    and rank alone, so a run can be repeated.

    Options:
        density: a fraction or a schedule.
        rounds: how often the interval is halved, 1 to 100; a pass over the tensor each.

    Reference: Shi et al., MLSys 2021.

    >>> ms_top_k(density=0.5).select(np.array([4.0, 1.0, 0.0, -2.0]), 2, Context())
    array([0, 3])
    """

    rounds: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rounds", self.rounds, tuple(range(1, 101)))

    def count(self, n: int, context: Context) -> int:
        return count(n, density_at(self.density, context.step, context.epoch))

    def find(
        self, x: np.ndarray, k: int, context: Context, *memory: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        sizes = np.abs(x)
        above, below = self._thresholds(sizes, k)
        sure = np.flatnonzero(sizes >= above)
        missing = k - sure.size
        if not missing:
            return (sure,)
        near = np.flatnonzero((sizes >= below) & (sizes < above))
        start = own_generator(context, turn=1).integers(near.size - missing + 1)
        return (np.sort(np.concatenate([sure, near[start : start + missing]])),)

    def _thresholds(self, sizes: np.ndarray, k: int) -> tuple[Any, Any]:
        """At most ``k`` elements reach the first; ``k`` or more reach the second."""
        scalar = sizes.dtype.type
        mean, largest = scalar(sizes.mean(dtype=np.float64)), sizes.max()
        above, below = scalar(np.inf), scalar(0)
        low, high = (mean, largest) if np.count_nonzero(sizes >= mean) > k else (below, mean)
        for _ in range(self.rounds):
            middle = low + (high - low) / scalar(2)
            passed = np.count_nonzero(sizes >= middle)
            if passed > k:
                low = below = middle
            else:
                high = above = middle
            if passed == k:
                break
        return above, below
