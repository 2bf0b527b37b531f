"""The gradient noise scale: numbers computed by hand, and gradients of known moments."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_compress.errors import ConfigError
from hvd_compress.training.large_batch import NoiseScale, gradient_moments


def test_the_noise_scale_of_gradients_with_known_moments():
    """Gradients G + noise with |G|^2 = 4 and tr(Sigma) = 50: B_simple is 12.5."""
    random = np.random.default_rng(0)
    d, ranks, batch, noise = 20, 4, 8, NoiseScale(decay=0.999)
    true = np.full(d, math.sqrt(4 / d))
    for _ in range(3000):
        means = true + random.normal(0, math.sqrt(50 / d / batch), (ranks, d))
        small = float(np.mean(np.sum(means**2, 1)))
        large = float(np.sum(means.mean(0) ** 2))
        noise.update(small, large, small=batch, large=ranks * batch)
    assert noise.squared == pytest.approx(4, rel=0.05)
    assert noise.variance == pytest.approx(50, rel=0.05)
    assert noise.value == pytest.approx(12.5, rel=0.08)


def test_the_noise_scale_says_what_it_knows():
    noise = NoiseScale(decay=0.5)
    assert noise.value == math.inf
    assert math.isnan(noise.variance)
    noise.update(math.nan, 1.0, small=1, large=2)
    assert math.isnan(noise.squared)
    noise.update(4 + 32 / 8, 4 + 32 / 64, small=8, large=64)
    assert noise.value == pytest.approx(8)  # at once, since the averages' start is corrected
    again = NoiseScale(decay=0.5)
    again.load_state_dict(noise.state_dict())
    assert again.value == noise.value
    with pytest.raises(ConfigError, match="two batch sizes are needed"):
        gradient_moments(1.0, 1.0, 8, 8)
    with pytest.raises(ConfigError, match="decay must be"):
        NoiseScale(1.0)
