"""The gradient noise scale: how large a batch is worth its examples (McCandlish et al., 2018)."""

from __future__ import annotations

import math

from hvd_compress.config import is_number
from hvd_compress.errors import ConfigError


def gradient_moments(
    small_squared: float, large_squared: float, small: int, large: int
) -> tuple[float, float]:
    """Return unbiased estimates of |G|^2, of the true gradient, and of tr(Sigma), the variance of
    one example's.

    E |G_B|^2 = |G|^2 + tr(Sigma) / B for a batch of B examples; two sizes give both terms.

    Args:
        small_squared: squared norm of the gradient of ``small`` examples, or a mean of several.
        large_squared: that of ``large`` examples.

    >>> gradient_moments(4 + 32 / 8, 4 + 32 / 64, 8, 64)
    (4.0, 32.0)
    """
    if not 0 < small < large:
        raise ConfigError(
            f"two batch sizes are needed, and these are {small} and {large}: several ranks, or "
            "backward_passes_per_step=2 or more"
        )
    squared = (large * large_squared - small * small_squared) / (large - small)
    variance = (small_squared - large_squared) / (1 / small - 1 / large)
    return squared, variance


class NoiseScale:
    """B_simple = tr(Sigma) / |G|^2, of which both terms are averaged over steps on their own, since
    a quotient of noisy numbers is biased::

        noise = NoiseScale()
        noise.update(small_squared, large_squared, small=32, large=256)
        print(noise.value)

    Batches far below it save steps in proportion to their size; far above it they save none.

    Args:
        decay: of the moving averages, whose bias at the beginning is corrected.

    Reference: McCandlish, Kaplan, Amodei et al., "An empirical model of large-batch training",
    2018, arXiv 1812.06162, appendix A.1.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not is_number(decay) or not 0 <= decay < 1:
            raise ConfigError(f"decay must be in [0, 1), for instance decay=0.99; got {decay!r}")
        self.decay = decay
        self._squared = self._variance = self._weight = 0.0

    def update(self, small_squared: float, large_squared: float, *, small: int, large: int) -> None:
        """Take in one step; see :func:`gradient_moments`.  What is not finite does not count."""
        squared, variance = gradient_moments(small_squared, large_squared, small, large)
        if not (math.isfinite(squared) and math.isfinite(variance)):
            return
        keep = self.decay
        self._squared = keep * self._squared + (1 - keep) * squared
        self._variance = keep * self._variance + (1 - keep) * variance
        self._weight = keep * self._weight + (1 - keep)

    @property
    def squared(self) -> float:
        """|G|^2, the squared norm of the true gradient; NaN before the first step."""
        return self._squared / self._weight if self._weight else math.nan

    @property
    def variance(self) -> float:
        """tr(Sigma), the variance of one example's gradient; NaN before the first step."""
        return self._variance / self._weight if self._weight else math.nan

    @property
    def value(self) -> float:
        """B_simple, in examples; infinite while the true gradient is lost in the noise."""
        if not self.squared > 0:
            return math.inf
        return max(self.variance, 0.0) / self.squared

    def state_dict(self) -> dict[str, float]:
        """Return what has been averaged so far."""
        return {"squared": self._squared, "variance": self._variance, "weight": self._weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a :meth:`state_dict`."""
        self._squared, self._variance = state["squared"], state["variance"]
        self._weight = state["weight"]
