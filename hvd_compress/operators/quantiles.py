"""Magnitudes that only a given fraction exceeds, from a distribution fitted by its moments."""

from __future__ import annotations

import math

import numpy as np

#: distributions of magnitudes
FITS = ("exponential", "pareto", "gamma")


def quantile(sizes: np.ndarray, ratio: float, fit: str) -> float:
    """The number that a fraction ``ratio`` (between 0 and 1) of positive ``sizes`` should exceed::

    exponential           -mean ln(ratio)
    generalised Pareto    a (1 - ratio^k) / k,  k = (q - 1) / 2, a = mean (q + 1) / 2,
                          q = mean^2 / variance
    gamma                 mean / alpha * Q^-1(alpha, ratio),
                          s = ln(mean) - mean(ln), alpha from s by Minka's closed form
    """
    mean = float(sizes.mean())
    if fit == "exponential":
        return -mean * math.log(ratio)
    if fit == "pareto":
        variance = float(sizes.var())
        if not variance > 1e-12 * mean**2:
            return mean
        q = mean**2 / variance
        k, a = (q - 1) / 2, mean * (q + 1) / 2
        log = math.log(ratio)
        return -a * log if abs(k * log) < 1e-9 else -a * math.expm1(k * log) / k
    s = math.log(mean) - float(np.log(sizes).mean())
    if not s > 1e-9:
        return mean
    alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return mean / alpha * inverse_upper_gamma(alpha, ratio)


def inverse_upper_gamma(alpha: float, ratio: float) -> float:
    """Return the x at which the regularised upper incomplete gamma function Q(alpha, x) is
    ``ratio``, to about nine digits, by bisection of ln x."""
    # Q <= ratio at the upper end: of Markov's inequality.
    low, high = -700.0, math.log(alpha / ratio)
    while high - low > 1e-9:
        middle = (low + high) / 2
        if upper_gamma(alpha, math.exp(middle)) > ratio:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def upper_gamma(alpha: float, x: float) -> float:
    """Return Q(alpha, x), the probability that a gamma-distributed number exceeds x."""
    front = math.exp(alpha * math.log(x) - x - math.lgamma(alpha))
    if x < alpha + 1:  # the power series of 1 - Q
        term = total = 1 / alpha
        n = alpha
        while term > 1e-16 * total:
            n += 1
            term *= x / n
            total += term
        return 1 - front * total
    # The continued fraction of Q, from its far end, which is the nearer the larger x is.
    steps = 20 + math.ceil(200 * math.sqrt(alpha + 1) / math.sqrt(x))
    tail = 0.0
    for i in range(steps, 0, -1):
        tail = i * (i - alpha) / (x + 2 * i + 1 - alpha - tail)
    return front / (x + 1 - alpha - tail)
