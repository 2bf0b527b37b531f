"""Baselines that a measure of generalisation has to beat."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def vc_dimension(omega: int, depth: int) -> float:
    """Return omega depth ln(omega), the growth of the VC dimension of networks of piecewise linear
    units (Bartlett, Harvey, Liaw and Mehrabian, 2019); without constants, which change no order.

    Args:
        omega: number of weights.
        depth: number of layers.
    """
    return omega * depth * math.log(max(omega, 2))


def noisy_oracle(gap: Sequence[float], noise: float, seed: int = 0) -> np.ndarray:
    """Return the gap itself with Gaussian noise: what a good measure scores; float64, (runs,).

    Args:
        gap: the generalisation gap of each run.
        noise: the standard deviation, in the units of the gap.
        seed: of the noise.
    """
    return np.asarray(gap, float) + np.random.default_rng(seed).normal(0, noise, len(gap))


def random_measure(runs: int, seed: int = 0) -> np.ndarray:
    """Return a measure that knows nothing: ``runs`` numbers in [0, 1), drawn from ``seed``."""
    return np.random.default_rng(seed).random(runs)


def canonical_ordering(values: Sequence[float], direction: int) -> np.ndarray:
    """Return a hyper-parameter as a measure: what everybody believes of it.

    Args:
        values: of the hyper-parameter, one a run.
        direction: 1 if more of it is believed to widen the gap, as of the batch size; else -1.
    """
    return direction * np.asarray(values, float)
