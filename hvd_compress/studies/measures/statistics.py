"""How well the order of a measure is that of the generalisation gap.

``settings`` are the hyper-parameters of the runs: one row per run, one column each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.errors import ConfigError


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
