"""Measures of generalisation: formulas and rank statistics, in NumPy.

After Jiang, Neyshabur, Mobahi, Krishnan and Bengio, "Fantastic generalization measures and where to
find them", 2019, arXiv 1912.02178, whose numbers of equations the formulas have.
``hvd_compress.torch.studies.measures`` takes them of models.

Formulas use the size of weights and how much noise they stand.

m: examples to train on; omega: number of weights; sigma and alpha: how much noise, and how large
an attack, the weights stand.

Statistics say how well the order of a measure is that of the generalisation gap.  ``settings`` are
the hyper-parameters of the runs: one row per run, one column each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.errors import ConfigError

__all__ = [
    "Scores",
    "bisect",
    "conditional_information",
    "flatness",
    "granulated",
    "kendall_tau",
    "magnitude_aware_bound",
    "pac_bayes_bound",
    "reported",
    "scores",
    "sharpness_bound",
    "spectral_bound",
    "vc_dimension",
]


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


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the mean over pairs of runs of the agreement of signs, from -1 to 1.  Ties agree with
    nothing, as in the paper, so a constant measure has 0.

    Args:
        x, y: a number for each run.

    >>> kendall_tau([1, 2, 3, 4], [1, 2, 4, 3])
    0.6666666666666666
    """
    u, v = _signs(x), _signs(y)
    _check_equal(len(u), len(v))
    if len(u) < 2:
        raise ConfigError("Kendall's tau needs two runs or more")
    return float((u * v).sum() / (len(u) * (len(u) - 1)))


def _signs(x: Any) -> np.ndarray:
    values = np.asarray(x, float)
    return np.sign(values[:, None] - values[None, :])


def _check_equal(*lengths: int) -> None:
    if len(set(lengths)) > 1:
        raise ConfigError(f"one value for each run: there are {', '.join(map(str, lengths))}")


def granulated(
    settings: Sequence[Sequence[Any]], measure: Sequence[float], gap: Sequence[float]
) -> list[float]:
    """Return psi_i for each hyper-parameter: Kendall's tau among runs that differ in it alone,
    averaged over the values of the others.  NaN where no runs differ in it alone.

    Args:
        settings: hyper-parameters, one row per run, one column each; a seed is one, too, if there
            are several.
        measure, gap: one number per run.
    """
    rows = [tuple(row) for row in settings]
    _check_equal(len(rows), len(measure), len(gap))
    found = []
    for axis in range(len(rows[0])):
        groups: dict[Any, list[int]] = {}
        for run, row in enumerate(rows):
            groups.setdefault(row[:axis] + row[axis + 1 :], []).append(run)
        taus = [
            kendall_tau([measure[r] for r in runs], [gap[r] for r in runs])
            for runs in groups.values()
            if len(runs) > 1
        ]
        found.append(float(np.mean(taus)) if taus else math.nan)
    return found


def conditional_information(
    settings: Sequence[Sequence[Any]],
    measure: Sequence[float],
    gap: Sequence[float],
    given: Sequence[int] = (),
) -> float:
    """Return I(V_mu; V_g | U_S) / H(V_g | U_S), from 0 to 1, over all ordered pairs of runs.

    V_mu and V_g are the signs of the differences of measure and gap.  U_S are the values of the
    hyper-parameters in S that both runs have.  0 if U_S alone tells the sign of the gap.
    U_S as in the scoring program of the competition PGDL (NeurIPS 2020), held by the paper's
    authors.

    Args:
        settings, measure, gap: as for :func:`granulated`.
        given: S, the columns of ``settings``, from 0; none for the information by itself.
    """
    rows = [tuple(row) for row in settings]
    _check_equal(len(rows), len(measure), len(gap))
    n = len(rows)
    off = ~np.eye(n, dtype=bool)
    known: dict[Any, int] = {}
    labels = [known.setdefault(tuple(row[i] for i in given), len(known)) for row in rows]
    label = np.array(labels)
    condition = (label[:, None] * len(known) + label[None, :])[off]
    u, v = (_signs(x)[off].astype(int) + 1 for x in (measure, gap))
    counts = np.zeros((len(known) ** 2, 3, 3))
    np.add.at(counts, (condition, u, v), 1)
    joint = counts / counts.sum()
    entropy = _entropy(joint.sum(1)) - _entropy(joint.sum((1, 2)))
    if entropy <= 1e-12:
        return 0.0
    both = _entropy(joint) - _entropy(joint.sum((1, 2)))
    own = _entropy(joint.sum(2)) - _entropy(joint.sum((1, 2)))
    return float(max(own + entropy - both, 0.0) / entropy)


def _entropy(p: np.ndarray) -> float:
    positive = p[p > 0]
    return float(-(positive * np.log(positive)).sum())


class Scores(NamedTuple):
    """How well a measure orders runs by their generalisation gap.

    Attributes:
        tau: Kendall's tau over all pairs of runs.
        psi: along each hyper-parameter; NaN where no runs differ in it alone.
        mean_psi: Psi, the mean of those that are not NaN; NaN if none are.
        information: normalised, given nothing (|S| = 0).
        given_one: given each hyper-parameter (|S| = 1).
        given_two: the least given two of them (|S| = 2).

    >>> settings = [(width, rate) for width in (1, 2) for rate in (0.1, 0.2)]
    >>> found = scores(settings, measure=[1, 2, 4, 3], gap=[1, 2, 3, 4])
    >>> round(found.tau, 3), found.psi, found.mean_psi
    (0.667, [1.0, 0.0], 0.5)
    """

    tau: float
    psi: list[float]
    mean_psi: float
    information: float
    given_one: list[float]
    given_two: float

    @property
    def least_information(self) -> float:
        """The least of all |S| up to 2."""
        return min(self.information, *self.given_one, self.given_two)


def scores(
    settings: Sequence[Sequence[Any]], measure: Sequence[float], gap: Sequence[float]
) -> Scores:
    """Return the :class:`Scores` of a measure.

    Args:
        settings: hyper-parameters, two or more: one row per run, one column each.
        measure, gap: one number per run.
    """
    psi = granulated(settings, measure, gap)

    def least(size: int) -> list[float]:
        return [
            conditional_information(settings, measure, gap, given)
            for given in itertools.combinations(range(len(psi)), size)
        ]

    known = [value for value in psi if not math.isnan(value)]
    mean = float(np.mean(known)) if known else math.nan
    return Scores(kendall_tau(measure, gap), psi, mean, least(0)[0], least(1), min(least(2)))
