"""The formulas in NumPy: numbers computed by hand, and laws."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.errors import ConfigError
from hvd_compress.training.large_batch import (
    adaptive_ascent,
    ascent,
    lamb_step,
    lars_step,
    rate_factor,
    warmed_up,
)

W, ZERO = np.array([3.0, 4.0]), np.zeros(2)
H = np.array([4.0, 1.0])


def test_goyals_warm_up():
    steps = 5 * 156
    peak = 0.1 * rate_factor(8192, 256)
    assert peak == pytest.approx(3.2)
    for t in range(0, steps + 1, 39):
        assert warmed_up(t, steps, 0.1, peak) == pytest.approx(0.1 + (3.2 - 0.1) * t / steps)
    assert warmed_up(steps + 5, steps, 0.1, peak) == peak
    assert warmed_up(0, 0, 0.1, peak) == peak


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 0}, "batch_size must be a number of examples"),
        ({"reference_batch_size": 2.5}, "reference_batch_size must be a number"),
        ({"scaling": "linaer"}, "did you mean 'linear'"),
    ],
)
def test_bad_scalings_are_errors(options, text):
    with pytest.raises(ConfigError, match=text):
        rate_factor(**{"batch_size": 8, "reference_batch_size": 4, **options})


def test_lars_by_hand():
    new, v = lars_step(W, np.array([0.6, 0.8]), ZERO, lr=1.0, weight_decay=0.1)
    np.testing.assert_allclose(v, [0.003, 0.004], rtol=1e-12)
    np.testing.assert_allclose(new, W - v, rtol=1e-12)
    _, v = lars_step(new, ZERO, v, lr=1.0, weight_decay=0.1)  # a gradient of 0: l = 1
    np.testing.assert_allclose(v, 0.9 * np.array([0.003, 0.004]) + 0.1 * new)


def test_lamb_by_hand():
    new, _, _ = lamb_step(W, np.array([0.6, 0.8]), ZERO, ZERO, 1, lr=0.1, weight_decay=0.01)
    np.testing.assert_allclose(W - new, [0.351841, 0.355257], atol=1e-6)
    moved, _, _ = lamb_step(ZERO, np.array([0.6, 0.8]), ZERO, ZERO, 1, lr=0.1)
    np.testing.assert_allclose(moved, [-0.1, -0.1], rtol=1e-5)  # ||w|| = 0: the quotient is 1


def test_steps_of_lars_and_lamb_do_not_depend_on_the_scale_of_the_gradient():
    g = np.array([0.6, 0.8])
    for scale in (1e-3, 1e3):
        np.testing.assert_allclose(
            lars_step(W, scale * g, ZERO, lr=1.0)[0], lars_step(W, g, ZERO, lr=1.0)[0]
        )
        np.testing.assert_allclose(
            lamb_step(W, scale * g, ZERO, ZERO, 1, lr=0.1, eps=0.0)[0],
            lamb_step(W, g, ZERO, ZERO, 1, lr=0.1, eps=0.0)[0],
        )


def test_sam_by_hand():
    w = np.ones(2)
    [eps] = ascent([H * w])
    np.testing.assert_allclose(eps, [0.0485071, 0.0121268], atol=1e-7)
    gradient = H * (w + eps)
    np.testing.assert_allclose(gradient, [4.194029, 1.012127], atol=1e-6)
    np.testing.assert_allclose(w - 0.1 * gradient, [0.580597, 0.898787], atol=1e-6)


def test_asam_by_hand():
    w = np.ones(2)
    [eps] = adaptive_ascent([w], [H * w], [True])
    np.testing.assert_allclose(eps, [0.489922, 0.122480], atol=1e-6)
    [plain] = adaptive_ascent([w], [H * w], [False], rho=0.05)  # T = 1: SAM
    np.testing.assert_allclose(plain, ascent([H * w])[0])


def test_the_norm_of_sam_is_that_of_all_tensors():
    parts = ascent([np.array([3.0]), np.array([[4.0]])], rho=1.0)
    assert float(parts[0][0]) == pytest.approx(0.6)
    assert parts[1].item() == pytest.approx(0.8)


def test_asams_sharpness_does_not_change_with_the_scale_of_layers():
    """f(w1, w2) = (w1 w2 - 1)^2 is the same at (c w1, w2 / c)."""

    def f(w1, w2):
        return ((w1 * w2 - 1) ** 2).item()

    def sharpness(w1, w2):
        residual = 2 * (w1 * w2 - 1)
        gradients = [residual * w2, residual * w1]
        e1, e2 = adaptive_ascent([w1, w2], gradients, [True, True], rho=0.1, eta=0.0)
        return f(w1 + e1, w2 + e2) - f(w1, w2)

    w1, w2 = np.array([1.5]), np.array([0.9])
    for c in (0.1, 1.0, 30.0):
        assert sharpness(c * w1, w2 / c) == pytest.approx(sharpness(w1, w2), rel=1e-9)
