"""Rank statistics and formulas, beside hand-computed cases and SciPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import kendalltau

from hvd_compress.errors import ConfigError
from hvd_compress.studies import measures

GRID = list(itertools.product([0, 1, 2], [0, 1], [0, 1, 2]))


def test_kendall_by_hand():
    assert measures.kendall_tau([1, 2, 3], [1, 2, 3]) == 1
    assert measures.kendall_tau([1, 2, 3], [3, 2, 1]) == -1
    assert measures.kendall_tau([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert measures.kendall_tau([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / 3)  # a tie agrees not
    assert measures.kendall_tau([5, 5], [1, 2]) == 0
    for bad in (([1], [1]), ([1, 2], [1, 2, 3])):
        with pytest.raises(ConfigError):
            measures.kendall_tau(*bad)


def test_kendall_is_scipys():
    random = np.random.default_rng(0)
    x, y = random.random((2, 40))  # without ties, with which it differs
    assert measures.kendall_tau(x, y) == pytest.approx(kendalltau(x, y).statistic)


def test_granulated_by_hand():
    """gap = 2 a - b: a measure that knows a alone, and wrongly b."""
    settings = [(a, b) for a in range(3) for b in range(2)]
    gap = [2 * a - b for a, b in settings]
    measure = [10 * a + b for a, b in settings]
    psi = measures.granulated(settings, measure, gap)
    assert psi == [1.0, -1.0]
    lonely = measures.scores([(0, 0), (1, 1)], [1, 2], [1, 2])
    assert all(map(math.isnan, [*lonely.psi, lonely.mean_psi]))
    partly = measures.scores([(0, 0), (1, 0)], [1, 2], [1, 2])
    assert (partly.psi[0], partly.mean_psi) == (1.0, 1.0)


def test_a_measure_along_one_axis_says_nothing_given_that_axis():
    gap = [100 * a + 10 * b + c for a, b, c in GRID]
    depth = [a for a, _, _ in GRID]
    assert measures.conditional_information(GRID, gap, gap) == pytest.approx(1)
    assert measures.conditional_information(GRID, depth, gap) > 0.5
    assert measures.conditional_information(GRID, depth, gap, [0]) == pytest.approx(0, abs=1e-12)
    assert measures.scores(GRID, depth, gap).least_information == pytest.approx(0, abs=1e-12)


def test_information_by_hand():
    """Two runs: the sign of the gap is one bit, and both measures that differ tell it."""
    settings = [(0,), (1,)]
    assert measures.conditional_information(settings, [1, 2], [4, 3]) == pytest.approx(1)
    assert measures.conditional_information(settings, [1, 1], [4, 3]) == 0
    assert measures.conditional_information(settings, [1, 2], [4, 3], [0]) == 0  # it is known
    # Three runs: signs (of the gap a<b<c) agree in two of three pairs.
    found = measures.conditional_information([(0,)] * 3, [1, 3, 2], [1, 2, 3])
    p, q = 2 / 3, 1 / 3
    expected = math.log(2) + p * math.log(p) + q * math.log(q)
    assert found == pytest.approx(expected / math.log(2))


def test_scores_are_those_of_one_after_the_other():
    gap = [100 * a + 10 * b + c for a, b, c in GRID]
    measure = [a - c for a, _, c in GRID]
    found = measures.scores(GRID, measure, gap)
    assert found.tau == measures.kendall_tau(measure, gap)
    assert found.psi == measures.granulated(GRID, measure, gap) == [1.0, 0.0, -1.0]
    assert found.mean_psi == 0
    assert found.information == measures.conditional_information(GRID, measure, gap)
    given = [measures.conditional_information(GRID, measure, gap, [i]) for i in range(3)]
    assert found.given_one == given
    assert found.given_two == min(
        measures.conditional_information(GRID, measure, gap, two)
        for two in ([0, 1], [0, 2], [1, 2])
    )
    assert found.least_information == min(found.information, *given, found.given_two)
    with pytest.raises(ConfigError, match="one value for each run"):
        measures.scores(GRID, measure, gap[1:])


def test_bounds_by_hand():
    assert measures.pac_bayes_bound(8.0, 0.5, 100) == pytest.approx(8 + math.log(200) + 10)
    found = measures.sharpness_bound(8.0, alpha=0.5, sigma=0.25, m=100, omega=50)
    assert found == pytest.approx(8 * math.log(100) + math.log(400) + 10)
    d = np.array([1.0, -3.0])
    by_hand = (
        0.25 * (math.log(7.5 / 0.5) + math.log(7.5 / 4.5)) + math.log(100 / math.sqrt(0.5)) + 10
    )
    assert measures.magnitude_aware_bound(10.0, d, math.sqrt(0.5), 100, 0.0) == pytest.approx(
        by_hand
    )
    assert measures.spectral_bound([2.0, 3.0], [8.0, 9.0], 0.5) == pytest.approx(
        math.log(36) + 2 * math.log(2) + math.log(3)
    )
    assert measures.flatness(0.2) == pytest.approx(25)
    assert measures.reported(-8.0, 2) == -2
    assert measures.vc_dimension(100, 3) == pytest.approx(300 * math.log(100))


def test_bisection_says_the_bounds():
    assert measures.bisect(lambda s: 0.0) == 2.0
    assert measures.bisect(lambda s: 1.0, steps=3) == 0.25
