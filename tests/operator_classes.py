"""The classes of operators by their definitions."""

from __future__ import annotations

import numpy as np


def adversaries(d):
    """Vectors on which bounds are tight or break first."""
    yield np.eye(d)[0]
    yield np.ones(d)
    yield 4 / 3 * np.ones(d)
    yield 1.5 ** np.arange(d)
    yield 2.0 ** -np.arange(d)
    yield np.array([1.0] + [1 / d] * (d - 1))
    yield np.array([1.0] + [1e-6] * (d - 1)) * np.resize([1, -1], d)
    for seed in range(3):
        yield np.random.default_rng(seed).standard_normal(d)


def check_constants(classes, found, x):
    """B1, B2, B3 and U of ``found`` (draws, d), what became of ``x``; means within five standard
    deviations."""
    alpha, beta, gamma, _, zeta = classes
    square = x @ x

    def mean(values):
        slack = 5 * values.std() / np.sqrt(len(values))
        return values.mean() - slack, values.mean() + slack

    least_energy, most_energy = mean((found**2).sum(1))
    least_product, most_product = mean(found @ x)
    least_error, _ = mean(((found - x) ** 2).sum(1))
    near = 1 + 1e-6
    assert alpha * square <= most_energy * near
    assert least_energy <= beta * most_product * near
    assert gamma * square <= most_product * near
    if zeta is not None:
        assert least_energy <= zeta * square * near
        assert least_product <= square * near
        assert square <= most_product * near
    if classes.own_delta is not None:
        assert least_error <= (1 - 1 / classes.own_delta + 1e-6) * square
