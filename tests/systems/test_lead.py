"""LEAD and Prox-LEAD: invariants, equality with exact diffusion, rates with two bits, rounding."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from hvd_compress.codecs import uniform_dithering
from hvd_compress.studies.estimators import LSVRG
from hvd_compress.systems.graphs import (
    EXTRA,
    LEAD,
    ExactDiffusion,
    l1,
    simulate,
)
from hvd_compress.systems.ranks import Ranks

#: the paper's quantisers of so many bits
CODECS = {bits: uniform_dithering(2 ** (bits - 1), 256, "max") for bits in (1, 2, 4)}
N, ROWS, D, RIDGE = 8, 15, 10, 0.05
WEIGHT = 0.05  # of |x|_1


@functools.cache
def problem():
    """Least squares with a ridge on each of eight nodes: matrices, targets, L."""
    random = np.random.default_rng(0)
    a = random.standard_normal((N, ROWS, D))
    truth = random.standard_normal(D)
    y = a @ truth + 0.1 * random.standard_normal((N, ROWS)) + random.standard_normal((N, 1))
    largest = max(np.linalg.eigvalsh(m.T @ m / ROWS).max() for m in a)
    return a, y, largest + RIDGE


def gradient(rank, x, step):
    a, y, _ = problem()
    dtype = x.dtype
    own = a[rank].astype(dtype)
    return own.T @ (own @ x - y[rank].astype(dtype)) / dtype.type(ROWS) + dtype.type(RIDGE) * x


@functools.cache
def solution(weight=0.0):
    """By proximal gradient descent on all data, which knows nothing of graphs."""
    a, y, smooth = problem()
    hessian = np.einsum("nri,nrj->ij", a, a) / (N * ROWS) + RIDGE * np.eye(D)
    towards = np.einsum("nri,nr->i", a, y) / (N * ROWS)
    x = np.zeros(D)
    for _ in range(20_000):
        v = x - (hessian @ x - towards) / smooth
        x = np.sign(v) * np.maximum(abs(v) - weight / smooth, 0)
    return x


def errors(method, steps, weight=0.0, dtype=np.float64):
    found, best = [], solution(weight)

    def observe(step, x):
        found.append(np.linalg.norm(x - best) / np.linalg.norm(np.tile(best, (N, 1))))

    rate = 0.5 / problem()[2]
    simulate(method, gradient, np.zeros((N, D), dtype), steps, rate, observe=observe)
    return np.array(found)


@pytest.mark.parametrize("prox", [None, l1(0.05)], ids=repr)
def test_without_compression_it_is_exact_diffusion(prox):
    """With a prox P2D2."""
    for alpha in (0.3, 1.0):
        pairs = [[], []]
        for method, rows in zip(
            (LEAD(codec=None, alpha=alpha, prox=prox), ExactDiffusion(prox=prox)),
            pairs,
            strict=True,
        ):
            rate = 0.5 / problem()[2]
            start = np.random.default_rng(1).standard_normal((N, D))
            simulate(method, gradient, start, 50, rate, observe=lambda _, x, r=rows: r.append(x))
        np.testing.assert_allclose(pairs[0], pairs[1], atol=1e-12)


def test_two_bits_are_about_as_good_as_all():
    two, plain = errors(LEAD(codec=CODECS[2]), 500), errors(LEAD(codec=None), 500)
    assert two[99] < 1e-3
    assert two[499] < 1e-10
    # The same linear rate, within a factor of 2 in the number of steps.
    for level in (1e-3, 1e-6, 1e-9):
        assert np.argmax(two < level) < 2 * np.argmax(plain < level)


@pytest.mark.parametrize(
    "method",
    [
        LEAD(codec=CODECS[2], prox=l1(WEIGHT)),
        *(kind(prox=l1(WEIGHT)) for kind in (ExactDiffusion, EXTRA)),
    ],
    ids=repr,
)
def test_prox_lead_and_its_comparators_reach_the_sparse_solution(method):
    found = errors(method, 500, WEIGHT)
    assert found[99] < 1e-3
    assert found[499] < 1e-10


def test_pg_extra_is_the_papers_recursion():
    """In stacked matrices, with what the last step was kept as it is."""
    prox, mu, w = l1(WEIGHT), 0.5 / problem()[2], EXTRA().topology.weights(N)
    x = np.random.default_rng(1).standard_normal((N, D))

    def g(x):
        return np.stack([gradient(rank, row, 0) for rank, row in enumerate(x)])

    half, expected, found = w @ x - mu * g(x), [], []
    last, x = x, prox(half, mu)
    for _ in range(20):
        expected.append(x)
        half = w @ x + half - (last + w @ last) / 2 - mu * (g(x) - g(last))
        last, x = x, prox(half, mu)
    start = np.random.default_rng(1).standard_normal((N, D))
    simulate(EXTRA(prox=prox), gradient, start, 20, mu, observe=lambda _, x: found.append(x))
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_range_of_alpha():
    """With one bit, small ones converge and large ones do not."""
    assert errors(LEAD(codec=CODECS[1], alpha=0.3), 300)[-1] < 1e-6
    with np.errstate(all="ignore"):
        assert not errors(LEAD(codec=CODECS[1], alpha=1.0), 100)[-1] < 1
    assert errors(LEAD(codec=CODECS[1], alpha=1.0, gamma=0.3), 300)[-1] < 1e-5


def test_invariants():
    method = LEAD(codec=CODECS[2])
    world, w = Ranks(method, N), method.topology.weights(N)
    x = [{"x": row} for row in np.random.default_rng(2).standard_normal((N, D))]
    for _ in range(30):
        x = world.before_step(x)
        x = [{"x": own["x"] - 0.1 * gradient(rank, own["x"], 0)} for rank, own in enumerate(x)]
        x = world.after_step(x)
        dual, h, mixed = (
            np.stack([state[key]["x"] for state in world.states])
            for key in ("dual", "h", "mixed_h")
        )
        np.testing.assert_allclose(dual.sum(axis=0), 0, atol=1e-12)
        np.testing.assert_allclose(mixed, w @ h, atol=1e-12)


def test_rounding_in_single_precision():
    assert 1e-6 < errors(LEAD(codec=None), 500, dtype=np.float32)[-1] < 1e-3


def test_the_proximal_operator_minimises():
    """Against a search on a grid."""
    eta, grid = 0.5, np.linspace(-3, 3, 60_001)
    for v in (-2.0, -0.1, 0.0, 0.12, 1.7):
        best = grid[np.argmin(0.3 * abs(grid) + (grid - v) ** 2 / (2 * eta))]
        assert abs(l1(0.3)(np.array([v]), eta)[0] - best) < 2e-4


def test_an_estimator_converges_to_the_solution_itself():
    a, y, _ = problem()

    def of(rank):
        def g(x, row):
            return a[rank, row] * (a[rank, row] @ x - y[rank, row]) + RIDGE * x

        return LSVRG(g, ROWS, np.random.default_rng(rank))

    estimators = [of(rank) for rank in range(N)]
    each = max((row @ row) + RIDGE for own in a for row in own)
    x = simulate(
        LEAD(codec=CODECS[2]),
        lambda rank, x, step: estimators[rank](x),
        np.zeros((N, D)),
        1500,
        1 / (3 * each),
    )
    assert np.linalg.norm(x - solution()) < 1e-3 * np.linalg.norm(solution())
