"""Select a proportion of the positive and of the negative elements (Dryden et al., MLHPC 2016)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from hvd_compress.base import Context
from hvd_compress.config import check_fraction
from hvd_compress.operators.on_host import HostSelector
from hvd_compress.operators.random_k import own_generator
from hvd_compress.operators.top_k import count
from hvd_compress.schedules import density_at

# Elements of a sample expected above the threshold; fewer make the threshold a gamble.
_HITS = 16
_ROUNDS = 20


@dataclasses.dataclass(frozen=True)
class adaptive_threshold(HostSelector, name="adaptive_threshold"):
    """The largest elements of each sign, about a fraction ``density`` of those of that sign.

    A threshold for each sign comes from a sample.  While it lets more than 1.25 times as many pass
    as it should it is raised by a factor of 1.25, while less than 0.8 times as many, lowered by
    0.9; 20 times at most.  Of each sign that occurs at least one element is picked.

    Options:
        density: a fraction or a schedule.
        sample_fraction: fraction of the elements of a sign that the first threshold comes from.

    Reference: Dryden, Moon, Jacobs, Van Essen, MLHPC 2016.

    >>> x = np.array([4.0, 2.0, 1.0, 1.0, -3.0, -5.0, -1.0, -1.0])
    >>> adaptive_threshold(density=0.5).select(x, None, Context())
    array([0, 1, 4, 5])
    """

    sample_fraction: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("sample_fraction", self.sample_fraction)

    def find(
        self, x: np.ndarray, k: int, context: Context, *memory: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        density = density_at(self.density, context.step, context.epoch)
        random = own_generator(context, turn=1)
        found = []
        for places, sizes in (
            (places, np.abs(x[places])) for places in (np.flatnonzero(x > 0), np.flatnonzero(x < 0))
        ):
            if places.size:
                found.append(places[sizes >= self._threshold(sizes, density, random)])
        return (np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64),)

    def _threshold(self, sizes: np.ndarray, density: float, random: np.random.Generator) -> float:
        n = sizes.size
        target = count(n, density)
        wanted = max(self.sample_fraction * n, _HITS * n / target)
        stride = max(1, int(n / wanted))
        sample = sizes[random.integers(stride) :: stride]
        rank = min(sample.size, max(1, math.ceil(sample.size * density - 1e-9)))
        found = float(np.partition(sample, sample.size - rank)[sample.size - rank])
        largest = float(sizes.max())
        for _ in range(_ROUNDS):
            passed = np.count_nonzero(sizes >= found)
            if 0.8 * target <= passed <= 1.25 * target:
                break
            # Not beyond the largest: one that is never sent would wait for ever.
            found = min(found * (1.25 if passed > target else 0.9), largest)
        return found
