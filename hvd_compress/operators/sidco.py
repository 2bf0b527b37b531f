"""Select by a threshold from a fitted distribution (SIDCo; Abdelmoniem et al., MLSys 2021)."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.config import check_choice, is_whole
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

    State: ``stages``, two numbers: M, 0 before the first gradient; and the sum of sent / k over the
    last steps.  The first gradient chooses the M that sends most nearly k elements of it; every 5
    steps, unless sent / k was within 0.8 to 1.2 on average, M is chosen so again.

    Options:
        density: a fraction or a schedule.
        fit: "exponential", "pareto" (generalised Pareto) or "gamma".
        stages: M if it shall not adapt.

    Reference: Abdelmoniem et al., MLSys 2021.  Differs from the authors' code in: there M begins
    with 1, which sends next to nothing of a light tail, and then falls by one if too much is sent,
    and grows if too little, though of a heavy tail more stages send less; zeros are neither fitted
    nor sent; at least the largest element is sent.

    How many are picked, as a multiple of k = 1000, and the stages that it took:

    >>> select, x = sidco(density=0.01), np.random.default_rng(0).exponential(size=100_000)
    >>> indices, state = select.pick(x, None, select.init(x), Context())
    >>> round(indices.size / 1000, 1), state["stages"][0].item()
    (1.0, 1.0)
    """

    fit: str = "exponential"
    stages: int | None = None

    keys = ("stages",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("fit", self.fit, FITS)
        m = self.stages
        if m is not None and (not is_whole(m) or m < 1):
            raise ConfigError(f"stages must be a number, 1 or more, or None to adapt; got {m!r}")

    def init(self, x: Array) -> State:
        xp = backend_of(x)
        memory = xp.from_numpy(np.array([self.stages or 0.0, 0]), x)
        return {"stages": xp.cast(memory, xp.dtype(x))}

    def find(
        self, x: np.ndarray, k: int, context: Context, *memory: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        stages, total = memory[0].tolist()
        if context.step % _PERIOD == 0:
            if self.stages is None and not _FEWEST <= total / _PERIOD <= _MOST:
                stages = 0
            total = 0.0
        places = np.flatnonzero(x)
        if places.size > k:
            # Whatever the scale of the gradient, squares are in range.
            sizes = np.abs(x[places]).astype(np.float64)
            sizes /= np.max(sizes)
            ratio = k / places.size
            most = max(1, math.ceil(-math.log2(k / x.size)))
            stages = round(stages) or self._best(sizes, ratio, most)
            places = places[sizes >= self._threshold(sizes, ratio, stages)]
        total += places.size / k
        return places, np.array([stages, total], memory[0].dtype)

    def _best(self, sizes: np.ndarray, ratio: float, most: int) -> int:
        """The number of stages that sends most nearly what is wanted."""

        def distance(stages: int) -> float:
            kept = np.count_nonzero(sizes >= self._threshold(sizes, ratio, stages))
            return abs(math.log(kept / (ratio * sizes.size)))

        return min(range(1, most + 1), key=distance)

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
