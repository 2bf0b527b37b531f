"""Measures that use the size of weights and how much noise they stand (Jiang et al., 2019).

m: examples to train on; omega: number of weights; sigma and alpha: how much noise, and how large
an attack, the weights stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def pac_bayes_bound(squared_norm: float, sigma: float, m: int) -> float:
    """Return (48) of ||w - w0||^2, or (49) of ||w||^2.

    squared_norm / (4 sigma^2) + ln(m / sigma) + 10

    Args:
        squared_norm: of the weights w, or of their way from where they began, w0.
        sigma: the deviation of the noise that the weights stand, as ``noise_scale`` finds it.
        m: number of examples to train on.
    """
    return squared_norm / (4 * sigma**2) + math.log(m / sigma) + 10


def sharpness_bound(squared_norm: float, alpha: float, sigma: float, m: int, omega: int) -> float:
    """Return (51) of ||w - w0||^2, or (52) of ||w||^2.

    squared_norm ln(2 omega) / (4 alpha^2) + ln(m / sigma) + 10

    The attack alpha stands in the first term alone; the second is that of (48).

    Args:
        squared_norm, sigma, m: as for :func:`pac_bayes_bound`.
        alpha: the radius that the weights stand, as ``adversarial_radius`` finds it.
        omega: number of weights.
    """
    return squared_norm * math.log(2 * omega) / (4 * alpha**2) + math.log(m / sigma) + 10


def magnitude_aware_bound(
    squared_norm: float, distances: np.ndarray, sigma: float, m: int, eps: float = 1e-3
) -> float:
    """Return (56) of ||w - w0||^2, or (57) of ||w||^2, with noise in proportion to each weight.

    (1/4) sum_i ln((eps^2 + (sigma^2 + 1) squared_norm / omega) / (eps^2 + sigma^2 d_i^2)) + ln(m /
    sigma) + 10

    Args:
        squared_norm, m: as for :func:`pac_bayes_bound`.
        distances: d_i = w_i - w0_i, of all omega weights, (omega,).
        sigma: sigma', relative to the weights.
        eps: the noise of weights that are 0.
    """
    top = eps**2 + (sigma**2 + 1) * squared_norm / distances.size
    terms = math.log(top) * distances.size - np.log(eps**2 + (sigma * distances) ** 2).sum()
    return float(terms) / 4 + math.log(m / sigma) + 10


def flatness(scale: float) -> float:
    """Return 1 / scale^2: (53) of sigma, (54) of alpha, (61) of sigma', (62) of alpha'.

    Args:
        scale: greater than 0.
    """
    return 1 / scale**2


def spectral_bound(
    spectral: Sequence[float], frobenius_squared: Sequence[float], gamma: float
) -> float:
    """Return the log of (26): log prod ||W||_2^2 - 2 log gamma + log sum ||W||_F^2 / ||W||_2^2.

    Args:
        spectral: ||W||_2 of each layer, as ``spectral_norms`` finds it.
        frobenius_squared: ||W||_F^2 of each layer.
        gamma: margin; only its magnitude counts.
    """
    squares = np.square(np.asarray(spectral, float))
    ratios = np.asarray(frobenius_squared, float) / squares
    return float(np.log(squares).sum() - 2 * math.log(abs(gamma)) + math.log(ratios.sum()))


def reported(value: float, m: int) -> float:
    """Return sqrt(value / m), with the sign of the value, as measures are reported.

    Args:
        value: a bound or the square of a norm.
        m: number of examples to train on.
    """
    return math.copysign(math.sqrt(abs(value) / m), value)


def bisect(
    rise: Callable[[float], float],
    target: float = 0.1,
    upper: float = 2.0,
    steps: int = 15,
    tolerance: float = 0.0,
) -> float:
    """Return the largest scale in (0, upper] at which ``rise`` is at most ``target``, by bisection.

    Args:
        rise: grows with the scale.
        target: the most that it may be.
        upper: the largest scale that is looked at.
        steps: how often the interval is halved.
        tolerance: stop as soon as the rise is this near to the target.

    Returns:
        ``upper`` if the rise is small even there; never 0, but 2^-steps upper at least.

    >>> round(bisect(lambda s: 2.5 * s * s, steps=40), 6)
    0.2
    """
    if rise(upper) <= target:
        return upper
    lower, top = 0.0, upper
    for _ in range(steps):
        middle = (lower + top) / 2
        found = rise(middle)
        if abs(found - target) < tolerance:
            return middle
        if found <= target:
            lower = middle
        else:
            top = middle
    return lower or top


def vc_dimension(omega: int, depth: int) -> float:
    """Return omega depth ln(omega), the growth of the VC dimension of networks of piecewise linear
    units.

    Constants, which change no order, are left out (Bartlett, Harvey, Liaw and Mehrabian, 2019).

    Args:
        omega: number of weights.
        depth: number of layers.
    """
    return omega * depth * math.log(max(omega, 2))
