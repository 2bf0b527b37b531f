"""The step sizes of error feedback: by hand, and that errors fall as the theorem says."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.errors import ConfigError
from hvd_compress.studies.step_sizes import FeedbackSteps


def test_by_hand():
    """14 * (2 * 2 + 1) * 10 = 700, and kappa = 56 * 5 * 10 / 0.5 = 5600."""
    steps = FeedbackSteps(delta=2, smoothness=10, mu=0.5, noise=1)
    assert steps.constant == pytest.approx(1 / 700)
    assert steps.kappa == pytest.approx(5600)
    assert steps.decreasing(0) == pytest.approx(steps.constant)
    assert steps.decreasing(5600) == pytest.approx(4 / (0.5 * 11200))
    np.testing.assert_allclose(steps.weights(3) * (5600 + 5601 + 5602), [5600, 5601, 5602])
    factor = 1 - 0.5 * 0.01 / 2
    expected = np.array([1 / factor, 1 / factor**2, 1 / factor**3])
    np.testing.assert_allclose(steps.weights(3, 0.01), expected / expected.sum())
    assert np.isfinite(steps.weights(10**6, 0.01)).all()
    with pytest.raises(ConfigError, match="delta"):
        FeedbackSteps(0.5, 1, 1).decreasing(0)


def distance(count, minima, eta):
    """The distance of the weighted average to the minimum of the mean of |x - minimum_i|^2 / 2,
    with Top-1 of two elements (delta = 2, L = mu = 1) and the residual in units of the step."""
    steps = FeedbackSteps(delta=2, smoothness=1, mu=1)
    minima = np.array(minima, float)
    x, e, path = np.array([3.0, -1.0]), np.zeros_like(minima), []
    for k in range(count):
        path.append(x)
        e = e + (eta or steps.decreasing(k)) * (x - minima)
        sent = np.where(np.abs(e) == np.abs(e).max(axis=1, keepdims=True), e, 0)
        e, x = e - sent, x - sent.mean(axis=0)
    average = steps.weights(count, eta) @ np.array(path)
    return float(np.linalg.norm(average - minima.mean(axis=0)))


def test_a_shared_minimum_is_reached_linearly():
    constant = FeedbackSteps(2, 1, 1).constant
    errors = [distance(count, [[1, 2], [1, 2]], constant) for count in (1000, 2000, 3000)]
    bound = (1 - constant / 2) ** 1000
    assert errors[1] < 2 * bound * errors[0]
    assert errors[2] < 2 * bound * errors[1]
    assert errors[2] < 1e-9


def test_decreasing_steps_go_on_where_ranks_differ():
    minima = [[5, -1], [-2, 4], [0, 1]]
    errors = [distance(count, minima, None) for count in (500, 5000, 20_000)]
    assert errors[1] < errors[0] / 4
    assert errors[2] < errors[1] / 2
