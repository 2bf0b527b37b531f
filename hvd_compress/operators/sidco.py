"""Select by a threshold from a fitted distribution (SIDCo; Abdelmoniem et al., MLSys 2021)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from hvd_compress.backend import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.operators.on_host import HostSelector
from hvd_compress.operators.quantiles import FITS, quantile

# Of the first of several stages.
_FIRST = 0.25
# Stages are reconsidered after so many steps, unless the number sent is as near as this.
_PERIOD = 5
_FEWEST, _MOST = 0.8, 1.2


@dataclasses.dataclass(frozen=True)
class sidco(HostSelector, name="sidco"):
    """About k = ceil(density * n) of the largest elements: those beyond a quantile of a
    distribution that is fitted to the magnitudes; nothing is sorted.

    One fit is far off in the tail, so there are stages.  The first of M stages keeps a quarter;
    each later one fits what exceeds the threshold before, less the smallest of it, and keeps
    ``(4 density)^(1 / (M - 1))`` of that.

    State: ``stages``, four numbers: M; the sum of sent / k since M was last reconsidered; the
    direction in which M moved last; and 1 or -1 if too much or too little had been sent then.
    Every 5 steps, unless sent / k was within 0.8 to 1.2 on average, M changes by one: downwards
    at first if too much was sent, upwards if too little; and on in that direction until enough is
    sent, or until M is 1 or log2(1 / density), where it turns round, or until too much becomes too
    little, where it turns round too.

    Options:
        density: a fraction or a schedule.
        fit: "exponential", "pareto" (generalised Pareto) or "gamma".
        stages: M if it shall not adapt.

    Differs from the authors' code in: there M always decreases if too much is sent, and may stay
    at 1, though of a heavy tail more stages send less; zeros are neither fitted nor sent; at least
    the largest element is sent.
    """

    fit: str = "exponential"
    stages: int | None = None

    keys = ("stages",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("fit", self.fit, FITS)
        m = self.stages
        if m is not None and (isinstance(m, bool) or not isinstance(m, int) or m < 1):
            raise ConfigError(f"stages must be a number, 1 or more, or None to adapt; got {m!r}")

    def init(self, x: Array) -> State:
        xp = backend_of(x)
        memory = xp.from_numpy(np.array([self.stages or 1.0, 0, 0, 0]), x)
        return {"stages": xp.cast(memory, xp.dtype(x))}

    def find(
        self, x: np.ndarray, k: int, context: Context, *memory: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        stages, total, direction, before = memory[0].tolist()
        places = np.flatnonzero(x)
        sizes = np.abs(x[places]).astype(np.float64)
        if places.size > k:
            # Whatever the scale of the gradient, squares are in range.
            sizes /= sizes.max()
            places = places[sizes >= self._threshold(sizes, k / places.size, round(stages))]
        if self.stages is None:
            total += places.size / k
            if (context.step + 1) % _PERIOD == 0:
                most = max(1, math.ceil(-math.log2(k / x.size)))
                stages, direction, before = _adapted(
                    round(stages), round(direction), round(before), total / _PERIOD, most
                )
                total = 0.0
        return places, np.array([stages, total, direction, before], memory[0].dtype)

    def _threshold(self, sizes: np.ndarray, ratio: float, stages: int) -> float:
        """``sizes`` are positive, and at most 1."""
        if ratio >= _FIRST:
            stages = 1
        found = _limited(quantile(sizes, ratio if stages == 1 else _FIRST, self.fit), sizes)
        for _ in range(stages - 1):
            sizes = sizes[sizes >= found]
            least = sizes.min()
            rest = sizes[sizes > least] - least
            if not rest.size:
                break
            later = quantile(rest, (ratio / _FIRST) ** (1 / (stages - 1)), self.fit)
            found = _limited(least + later, sizes)
        return found


def _limited(found: float, sizes: np.ndarray) -> float:
    return min(found, float(sizes.max()))


def _adapted(
    stages: int, direction: int, before: int, achieved: float, most: int
) -> tuple[int, int, int]:
    """The next number of stages, how it moved, and whether too much (1) or too little (-1) had
    been sent."""
    if _FEWEST <= achieved <= _MOST:
        return stages, 0, 0
    side = 1 if achieved > 1 else -1
    if direction == 0:
        direction = -side
    elif side != before:
        direction = -direction
    if not 1 <= stages + direction <= most:
        direction = -direction
    return min(max(stages + direction, 1), most), direction, side
