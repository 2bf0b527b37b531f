"""Theory from the constants of an operator: the step sizes of EF21 and of error feedback, and what
top-k keeps of random inputs.  :class:`hvd_compress.codecs.selector.Classes` has the constants.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np

from hvd_compress.config import check_choice, check_fraction
from hvd_compress.errors import ConfigError


def kept_by_top_k(density: float, inputs: str) -> float:
    """Return E|top_k(x)|^2 / E|x|^2 for many independent elements: at least ``density``, which is
    the worst case and what elements at random keep.  With the share rho and the threshold t::

        "normal"       2 (t phi(t) + Q(t)),    Q(t) = rho / 2
        "exponential"  rho (1 + t + t^2 / 2),  t = log(1 / rho)
        "uniform"      1 - (1 - rho)^3

    >>> [round(kept_by_top_k(0.01, x), 3) for x in ("normal", "exponential", "uniform")]
    [0.084, 0.162, 0.03]
    """
    check_fraction("density", density)
    check_choice("inputs", inputs, ("normal", "exponential", "uniform"))
    if inputs == "uniform":
        return 1 - (1 - density) ** 3
    if inputs == "exponential":
        t = -math.log(density)
        return density * (1 + t + t * t / 2)
    normal = statistics.NormalDist()
    t = -normal.inv_cdf(density / 2)
    return 2 * t * normal.pdf(t) + density


class EF21Constants(NamedTuple):
    """The constants of EF21 with an operator in B3(delta): see :func:`ef21_constants`."""

    theta: float
    beta: float


def ef21_constants(delta: float) -> EF21Constants:
    """Return, with alpha = 1/delta, theta = 1 - sqrt(1 - alpha) and beta = (1 - alpha) / theta.

    They say how the error of the estimates shrinks by itself, and grows with a step from x to y::

        E|h' - g(y)|^2 <= (1 - theta) E|h - g(x)|^2 + beta L^2 |y - x|^2

    >>> theta, beta = ef21_constants(3)
    >>> f"{theta:.6f} {beta:.6f}"
    '0.183503 3.632993'
    """
    if not delta >= 1:
        raise ConfigError(f"delta must be 1 or more; got {delta!r}")
    alpha = 1 / delta
    theta = 1 - math.sqrt(1 - alpha)
    return EF21Constants(theta, (1 - alpha) / theta)


def ef21_step_size(
    delta: float, smoothness: float, mean_smoothness: float | None = None, mu: float | None = None
) -> float:
    """Return the largest step size for which EF21 is proved to converge::

        1 / (L + L~ sqrt(beta / theta))                            to a stationary point
        min(1 / (L + L~ sqrt(2 beta / theta)), theta / (2 mu))     linearly, by 1 - step * mu

    Args:
        delta: of what is sent, class B3: ``top_k(0.01).classes(d).delta``.
        smoothness: L, of the average over the ranks.
        mean_smoothness: L~, the quadratic mean of the ranks' own; ``None``: as ``smoothness``.
        mu: of the Polyak-Lojasiewicz condition, for instance of strong convexity.

    Reference: Richtarik, Sokolov and Fatkhullin, NeurIPS 2021.  The step sizes are recalled, not
    checked against the paper; the inequality of :func:`ef21_constants` is derived.
    """
    theta, beta = ef21_constants(delta)
    tilde = smoothness if mean_smoothness is None else mean_smoothness
    if mu is None:
        return 1 / (smoothness + tilde * math.sqrt(beta / theta))
    return min(1 / (smoothness + tilde * math.sqrt(2 * beta / theta)), theta / (2 * mu))


class FeedbackSteps(NamedTuple):
    """The step sizes for which SGD with error feedback in units of the step is proved to converge.

    The average of iterates that converges is x~ = sum_k w_k x_k / sum_k w_k::

        constant    eta <= 1 / (14 (2 delta + B) L),  w_k = (1 - mu eta / 2)^-(k + 1)
        decreasing  eta_k = 4 / (mu (kappa + k)),     w_k = kappa + k,
                    kappa = 56 (2 delta + B) L / mu

    Attributes:
        delta: of what is sent, class B3: ``top_k(0.01).classes(d).delta``.
        smoothness: L.
        mu: of strong convexity.
        noise: B, where E|noise of a gradient|^2 is at most B |gradient|^2 + C; 0 for exact ones.

    Reference: Beznosikov et al., JMLR 2023.  The constants are recalled, not checked against the
    paper.

    >>> steps = FeedbackSteps(delta=2, smoothness=10, mu=1)
    >>> 1 / steps.constant, steps.kappa, 1 / steps.decreasing(2240)
    (560.0, 2240.0, 1120.0)
    """

    delta: float
    smoothness: float
    mu: float
    noise: float = 0.0

    @property
    def constant(self) -> float:
        """The largest constant step; the first of the decreasing ones is as large."""
        if not self.delta >= 1:
            raise ConfigError(f"delta must be 1 or more; got {self.delta!r}")
        return 1 / (14 * (2 * self.delta + self.noise) * self.smoothness)

    @property
    def kappa(self) -> float:
        return 4 / (self.mu * self.constant)

    def decreasing(self, k: int) -> float:
        """Return eta_k, for k from 0."""
        return 4 / (self.mu * (self.kappa + k))

    def weights(self, count: int, eta: float | None = None) -> np.ndarray:
        """Return the weights of the first ``count`` iterates, which add up to 1: of the constant
        step ``eta``, or of the decreasing steps."""
        k = np.arange(count)
        if eta is None:
            return (self.kappa + k) / (self.kappa + k).sum()
        found = (1 - self.mu * eta / 2) ** (count - 1.0 - k)  # the largest is 1
        return found / found.sum()
