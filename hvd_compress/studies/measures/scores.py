"""All rank statistics of one measure: a row of the paper's tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .statistics import conditional_information, granulated, kendall_tau, mean_psi


class Scores(NamedTuple):
    """How well a measure orders runs by their generalisation gap.

    Attributes:
        tau: Kendall's tau over all pairs of runs.
        psi: along each hyper-parameter; NaN where no runs differ in it alone.
        mean_psi: Psi, their mean.
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
        settings: hyper-parameters, two or more: one row a run, one column each.
        measure, gap: one number a run.

    Raises:
        ConfigError: the numbers of runs differ, or there are fewer than two.
    """
    psi = granulated(settings, measure, gap)

    def least(size: int) -> list[float]:
        return [
            conditional_information(settings, measure, gap, given)
            for given in itertools.combinations(range(len(psi)), size)
        ]

    return Scores(
        kendall_tau(measure, gap), psi, mean_psi(psi), least(0)[0], least(1), min(least(2))
    )
