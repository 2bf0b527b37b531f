"""Decentralised methods: iterates and limits by hand, steady states, stability, exactness."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_compress import ConfigError
from hvd_compress.engines.local import LocalEngine
from hvd_compress.studies import decentralized as theory
from hvd_compress.systems import Coordinator
from hvd_compress.systems.graphs import (
    DGD,
    EXTRA,
    LEAD,
    Diffusion,
    ExactDiffusion,
    GradientTracking,
    simulate,
)
from hvd_compress.systems.ranks import Ranks
from hvd_compress.systems.topologies import Weights, as_topology

B = np.array([0.0, 0.0, 3.0])
EXACT = (
    *(ExactDiffusion("line"), EXTRA("line"), LEAD("line", codec=None)),
    GradientTracking("line"),
)
OWN = Weights([[0.5, 0.5, 0], [0.5, 0.2, 0.3], [0, 0.3, 0.7]])


def pull(rank, x, step):
    return x - B[rank]


def iterates(method, steps, mu=0.1, start=None):
    found = []
    start = np.zeros((3, 1)) if start is None else start
    simulate(method, pull, start, steps, mu, observe=lambda _, x: found.append(x[:, 0]))
    return found


# -- section H.5 -----------------------------------------------------------------------------------


def where_dgd_ends(w, b, mu):
    return mu * np.linalg.solve((1 + mu) * np.eye(len(w)) - w, b)


@pytest.mark.parametrize(
    ("method", "fixed", "limit"),
    [
        (Diffusion("line"), theory.diffusion_fixed_point, (0.75, 1, 1.25)),
        (DGD("line"), where_dgd_ends, (0.699301, 0.909091, 1.391608)),
    ],
)
def test_biased_limits(method, fixed, limit):
    w = as_topology("line").weights(3)
    np.testing.assert_allclose(fixed(w, B, 0.1), limit, atol=5e-7)
    np.testing.assert_allclose(iterates(method, 400)[-1], fixed(w, B, 0.1), rtol=1e-12)


@pytest.mark.parametrize("method", EXACT, ids=repr)
def test_exact_methods_reach_the_minimum(method):
    start = np.array([[3.0], [-1.0], [0.5]])  # apart
    np.testing.assert_allclose(iterates(method, 600, start=start)[-1], 1, atol=1e-10)


def test_closed_recursions():
    """Exact diffusion and gradient tracking against the formulas in stacked matrices."""
    w, mu, x = as_topology("line").weights(3), 0.1, np.array([3.0, -1.0, 0.5])
    wt, start = (np.eye(3) + w) / 2, x[:, None].copy()

    def g(x):
        return x - B

    exact = [x, wt @ (x - mu * g(x))]
    for _ in range(5):
        a, b = exact[-1], exact[-2]
        exact.append(wt @ (2 * a - b - mu * (g(a) - g(b))))
    np.testing.assert_allclose(iterates(ExactDiffusion("line"), 6, start=start), exact[1:])
    y, tracked = g(x), []
    for _ in range(6):
        after = w @ x - mu * y
        y = w @ y + g(after) - g(x)
        x = after
        tracked.append(x)
    np.testing.assert_allclose(iterates(GradientTracking("line"), 6, start=start), tracked)


@pytest.mark.parametrize("kind", [ExactDiffusion, EXTRA, GradientTracking, LEAD])
def test_a_matrix_of_ones_own(kind):
    """It leads to the same minimum, on a way of its own."""
    options = {"codec": None} if kind is LEAD else {}
    own, line = (iterates(kind(graph, **options), 800, mu=0.05) for graph in (OWN, "line"))
    np.testing.assert_allclose(own[-1], 1, atol=1e-9)
    assert abs(own[2] - line[2]).max() > 1e-3


def test_graphs_that_change():
    method = GradientTracking("one_peer")
    np.testing.assert_allclose(iterates(method, 600)[-1], 1, atol=1e-9)


# -- section H.3 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "limit"),
    [
        (ExactDiffusion("cycle"), 2),  # 2 / L, whatever the graph
        (DGD("cycle"), 1 - 1 / 3),  # (1 + the lowest eigenvalue) / L
    ],
)
def test_largest_learning_rates(method, limit):
    """On a cycle of four, whose lowest eigenvalue is -1/3."""
    start = np.random.default_rng(0).standard_normal((4, 3))
    below, above = (
        abs(simulate(method, lambda rank, x, step: x, start, 800, factor * limit)).max()
        for factor in (0.99, 1.02)
    )
    assert below < 1e-2
    assert above > 1e2


def test_extra_converges_within_its_bound_and_not_far_beyond():
    """The mode of the lowest eigenvalue lam has z^2 - (1 + lam - mu) z + (1 + lam) / 2 - mu, with a
    root at -1 for mu = (1 + 3 (1 + lam) / 2) / 2, which is 1 on a cycle of four."""
    start = np.random.default_rng(0).standard_normal((4, 3))
    bound = 2 / 3  # that of DGD
    within, beyond = (
        abs(simulate(EXTRA("cycle"), lambda rank, x, step: x, start, 800, mu)).max()
        for mu in (0.99 * bound, 1.02)
    )
    assert within < 1e-2
    assert beyond > 1e2


# -- section H.6 -----------------------------------------------------------------------------------

#: graph, mu, s^2: bias and noise of diffusion, exact diffusion
MSD = [
    ("line", 0.1, 1, 0.31128, 0.011412, 0.016751),
    ("line", 0.01, 1, 0.10882, 5.107e-4, 6.852e-4),
    ("line", 0.01, 0.01, 0.10882, 5.107e-6, 6.85e-6),
    ("cycle", 0.1, 1, 0.13757, 0.010128, 0.015476),
    ("cycle", 0.01, 1, 0.012098, 4.127e-4, 5.691e-4),
    ("grid:rows=4", 0.01, 1, 1.5959e-3, 3.108e-4, 4.095e-4),
    ("complete", 0.1, 1, 0, 0.0026316, 0.0062301),
    ("complete", 0.01, 1, 0, 2.5126e-4, 2.8903e-4),
]


@pytest.mark.parametrize(("graph", "mu", "variance", "bias", "noise", "exact"), MSD)
def test_closed_forms_of_steady_states(graph, mu, variance, bias, noise, exact):
    w, b = as_topology(graph).weights(20), np.linspace(-1, 1, 20)
    np.testing.assert_allclose(
        theory.diffusion_msd(w, b, mu, variance), (bias, noise), rtol=3e-4, atol=1e-12
    )
    np.testing.assert_allclose(theory.exact_diffusion_msd(w, mu, variance), exact, rtol=1e-3)


def test_closed_forms_of_three_nodes():
    w = as_topology("line").weights(3)
    found = theory.diffusion_msd(w, B, 0.1, 1.0)
    np.testing.assert_allclose(found, (0.0416667, 0.0198587), rtol=1e-5)
    assert abs(theory.exact_diffusion_msd(w, 0.1, 1.0) - 0.0243620) < 5e-8
    # Where all average exactly, diffusion is centralised SGD.
    complete = as_topology("complete").weights(20)
    noise = theory.diffusion_msd(complete, np.zeros(20), 0.1, 1.0)[1]
    assert abs(noise - 0.1 / (20 * (2 - 0.1))) < 1e-12


# -- messages and states ---------------------------------------------------------------------------


def test_bytes_are_those_of_the_neighbours():
    """A vector of 100 float64 in a frame of 16 bytes more, for each neighbour of rank 0."""
    for method, vectors in ((ExactDiffusion, 1), (GradientTracking, 2)):
        for topology, neighbours in (("line", 1), ("cycle", 2), ("complete", 7)):
            world = Ranks(method(topology), 8)
            x = [{"a": np.ones((9, 10)), "b": np.ones(10)} for _ in range(8)]
            x = world.after_step(world.before_step(x))
            assert world.bytes_sent == neighbours * (16 + vectors * 800)
            assert x[0]["a"].shape == (9, 10)


def steps(coordinator, x, count):
    """Local steps of 1/8 towards 0."""
    for _ in range(count):
        x = coordinator.before_step(x)
        x = coordinator.after_step({name: own * 0.875 for name, own in x.items()})
    return x


def test_a_state_serves_the_parameters_that_it_was_made_for():
    x = {"a": np.ones(2), "b": np.full((1, 3), 5.0)}
    coordinator = Coordinator(GradientTracking, LocalEngine())
    x = steps(coordinator, x, 2)
    assert list(coordinator.state["tracker"]) == ["a", "b"]
    steps(coordinator, {"b": x["b"]}, 1)
    assert list(coordinator.state["tracker"]) == ["b"]
    steps(coordinator, x, 1)
    assert list(coordinator.state["tracker"]) == ["a", "b"]
    assert steps(coordinator, {}, 1) == {}


def test_the_order_of_parameters_in_a_checkpoint_does_not_matter():
    x = {"a": np.ones(2), "b": np.full((1, 3), 5.0)}
    coordinator, other = (Coordinator(ExactDiffusion, LocalEngine()) for _ in range(2))
    x = steps(coordinator, x, 2)
    saved = coordinator.state_dict()
    turned = {key: dict(reversed(own.items())) for key, own in saved["state"].items()}
    other.load_state_dict({**saved, "state": turned})
    np.testing.assert_equal(steps(coordinator, x, 2), steps(other, x, 2))


def test_numbers_of_ranks_that_cannot_be_are_found_at_once():
    for method, words in ((Diffusion("grid:rows=2"), "rows=2"), (Diffusion([(0, 3)]), "beyond")):
        with pytest.raises(ConfigError, match=words):
            Coordinator(method, LocalEngine())
    with pytest.raises(ConfigError, match="no training method"):
        Coordinator("exact_diffusion", LocalEngine())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: simulate(DGD(), pull, np.zeros((3, 1)), 1, 0.0), "rate"),
        (lambda: simulate(DGD(), pull, np.zeros((3, 1)), -1, 0.1), "steps"),
    ],
)
def test_bad_options(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
