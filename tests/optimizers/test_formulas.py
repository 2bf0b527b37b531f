"""The formulas in NumPy: numbers computed by hand, and laws."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress.errors import ConfigError
from hvd_compress.optimizers import (
    LAMB,
    LARS,
    SAM,
    Now,
    OuterSGD,
    rate_factor,
    warmed_up,
)

W, G = np.array([[3.0, 4.0]]), np.array([[0.6, 0.8]])
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
    lars = LARS(lr=1.0, weight_decay=0.1)
    new, state = lars.step(W, G, {}, Now())
    np.testing.assert_allclose(state["velocity"], [[0.003, 0.004]], rtol=1e-12)
    np.testing.assert_allclose(new, W - state["velocity"], rtol=1e-12)
    _, state = lars.step(new, 0 * G, state, Now(2))  # a gradient of 0: l = 1
    expected = 0.9 * np.array([[0.003, 0.004]]) + 0.1 * new
    np.testing.assert_allclose(state["velocity"], expected)
    # A bias takes plain steps, without decay.
    np.testing.assert_allclose(lars.step(W[0], G[0], {}, Now())[0], W[0] - G[0])


def test_lamb_by_hand():
    new, _ = LAMB(lr=0.1, weight_decay=0.01).step(W, G, {}, Now())
    np.testing.assert_allclose(W - new, [[0.351841, 0.355257]], atol=1e-6)
    moved, _ = LAMB(lr=0.1).step(0 * W, G, {}, Now())
    np.testing.assert_allclose(moved, [[-0.1, -0.1]], rtol=1e-5)  # ||w|| = 0: the quotient is 1


@pytest.mark.parametrize("formula", [LARS(lr=1.0), LAMB(lr=0.1, eps=0.0)])
def test_steps_do_not_depend_on_the_scale_of_the_gradient(formula):
    plain, _ = formula.step(W, G, {}, Now())
    for scale in (1e-3, 1e3):
        np.testing.assert_allclose(formula.step(W, scale * G, {}, Now())[0], plain)


def test_outer_steps_by_hand():
    x, d = np.array([1.0]), np.array([0.5])
    new, state = OuterSGD(0.5, 0.5, nesterov=True).stepped(x, d, {"velocity": np.array([1.0])})
    assert (state["velocity"].item(), new.item()) == (1.0, 0.5)  # 1 - 0.5 (0.5 + 0.5 * 1)


def test_sam_by_hand():
    w = np.ones(2)
    [eps] = SAM().ascent([w], [H * w])
    np.testing.assert_allclose(eps, [0.0485071, 0.0121268], atol=1e-7)
    gradient = H * (w + eps)
    np.testing.assert_allclose(gradient, [4.194029, 1.012127], atol=1e-6)
    np.testing.assert_allclose(w - 0.1 * gradient, [0.580597, 0.898787], atol=1e-6)


def test_the_norm_of_sam_is_that_of_all_tensors():
    gradients = [np.array([3.0]), None, np.array([[4.0]], np.float32)]
    weights = [np.ones(1), np.ones(1), np.ones((1, 1), np.float32)]
    parts = SAM(rho=1.0).ascent(weights, gradients)
    assert [None if x is None else x.item() for x in parts] == pytest.approx([0.6, None, 0.8])
    assert parts[2].dtype == np.float32
