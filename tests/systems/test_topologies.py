"""Graphs and their combination matrices."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hvd_compress import ConfigError, from_config
from hvd_compress.systems.graphs import (
    Diffusion,
    Edges,
    ExactDiffusion,
    Graph,
    Weights,
    as_topology,
    eigenvalues,
    second_eigenvalue,
    spectral_gap,
)

#: neighbours to whom rank 1 of nine sends, in the first step
EVERY = {
    "line": (0, 2),
    "cycle": (0, 2),
    "grid": (0, 2, 4),
    "torus": (0, 2, 4, 7),
    "star": (0,),
    "complete": (0, 2, 3, 4, 5, 6, 7, 8),
    "exponential": (0, 2, 3, 5),
    "one_peer": (2,),
}


def weights(name, size):
    return as_topology(name).weights(size)


@pytest.mark.parametrize("name", EVERY)
def test_neighbours_by_hand(name):
    assert as_topology(name).neighborhood(1, 9, 1).targets == EVERY[name]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 16])
def test_weights_are_doubly_stochastic_and_bring_ranks_together(name, size):
    topology, product = as_topology(name), np.eye(size)
    for step in range(topology.period(size)):
        w = topology.weights(size, step)
        np.testing.assert_allclose([w.sum(0), w.sum(1)], 1, atol=1e-12)
        assert w.min() >= 0
        for rank in range(size):
            found = topology.neighborhood(rank, size, step + 1)
            assert found.sources == tuple(j for j in range(size) if w[rank, j] and j != rank)
            assert found.targets == tuple(j for j in range(size) if w[j, rank] and j != rank)
        product = w @ product
    assert size == 1 or second_eigenvalue(product) < 1
    if name not in ("exponential", "one_peer"):
        np.testing.assert_array_equal(product, product.T)
    assert from_config(topology.to_config()) == topology


def test_eigenvalues_and_gaps_by_hand():
    n = 20
    cycle = (1 + 2 * np.cos(2 * np.pi * np.arange(n) / n)) / 3
    found = eigenvalues(weights("cycle", n))
    np.testing.assert_allclose(np.sort(found), np.sort(cycle), atol=1e-12)
    gaps = [spectral_gap(weights(name, n)) for name in ("cycle", "line", "grid:rows=4")]
    np.testing.assert_allclose(gaps, [0.032629, 0.008208, 0.085748], atol=5e-7)
    assert abs(second_eigenvalue(weights("exponential", 16)) - 0.6) < 1e-12
    assert abs(min(eigenvalues(weights("cycle", 4))) + 1 / 3) < 1e-12
    assert min(eigenvalues((np.eye(4) + weights("cycle", 4)) / 2)) > 0


def test_weights_by_hand():
    np.testing.assert_allclose(weights("line", 3) * 3, [[2, 1, 0], [1, 1, 1], [0, 1, 2]])
    np.testing.assert_allclose(weights("cycle", 5)[0], [1 / 3, 1 / 3, 0, 0, 1 / 3])
    np.testing.assert_allclose(weights("star", 4)[:, 0], [1 / 4] * 4)
    np.testing.assert_allclose(weights("star", 4)[1], [1 / 4, 3 / 4, 0, 0])


@pytest.mark.parametrize("size", [2, 4, 16])
def test_one_peer_exponential_averages_exactly_in_a_period(size):
    topology, product = Graph("one_peer"), np.eye(size)
    for step in range(topology.period(size)):
        product = topology.weights(size, step) @ product
    np.testing.assert_allclose(product, 1 / size, atol=1e-15)


def test_texts_and_pairs():
    assert as_topology("grid:rows=4") == Graph("grid", 4)
    assert as_topology("cycle") == Graph("cycle")
    assert as_topology([(0, 1), [1, 2]]) == Edges(((0, 1), (1, 2)))
    topology = Edges(((0, 1), (1, 2), (2, 0)), True)
    assert from_config(topology.to_config()) == topology


#: rank 0 does not hear rank 2, and takes more of itself than the others do
OWN = np.array([[0.75, 0.25, 0], [0.25, 0.25, 0.5], [0, 0.5, 0.5]])


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy, np.ndarray.tolist])
def test_a_matrix_of_ones_own(make):
    topology = Weights(make(OWN))
    assert topology == from_config(json.loads(json.dumps(topology.to_config())))
    np.testing.assert_array_equal(topology.weights(3), OWN)
    network = topology.neighborhood(0, 3, 1)
    assert (network.own, network.targets, network.sources) == (0.75, (1,), (1,))
    assert network.weights == (0.25,)
    ExactDiffusion(topology).check_ranks(3)
    if make is not np.ndarray.tolist:  # of which lists are pairs
        assert as_topology(make(OWN)) == topology


def test_a_directed_matrix_of_ones_own():
    """With weights that are column stochastic alone, ranks would not agree on the average."""
    c = np.array([[0.5, 0, 0.5], [0.25, 0.5, 0], [0.25, 0.5, 0.5]])
    with pytest.raises(ConfigError, match="doubly stochastic"):
        Diffusion(c).check_ranks(3)
    turn = (np.eye(3) + np.roll(np.eye(3), 1, axis=0)) / 2
    network = as_topology(turn).neighborhood(0, 3, 1)
    assert (network.own, network.targets, network.sources) == (0.5, (1,), (2,))
    with pytest.raises(ConfigError, match="undirected"):
        ExactDiffusion(turn).check_ranks(3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Weights(), "square"),
        (lambda: Weights(OWN[:2]), "square"),
        (lambda: Weights([[0.5, 0.5], [1.0]]), "square"),
        (lambda: Weights("cycle"), "square"),
        (lambda: Weights([[1.5, -0.5], [-0.5, 1.5]]), "less than 0"),
        (lambda: Weights([[np.nan, 1], [1, 0]]), "finite"),
        (lambda: Weights(OWN).weights(4), "for 3 ranks, and there are 4"),
        (lambda: Weights(np.eye(2)).weights(2), "not connected"),
        (lambda: Weights([[0, 1], [1, 0]]).weights(2), "never brings"),
        (lambda: Weights(np.full((3, 3), 1 / 3, np.float32)).weights(3), "float64"),
        (lambda: Weights([[0.5, 0.4], [0.4, 0.5]]).weights(2), "doubly stochastic"),
        (lambda: Edges(((0, 1), (2, 3))).weights(4), "not connected"),
        (lambda: Edges(((0, 1),)).weights(1), "beyond the 1 ranks"),
        (lambda: Edges(((0, 1), (1, 0), (1, 2), (2, 0)), True).weights(3), "as many neighbours in"),
        (lambda: Graph("grid", 3).weights(4), "do not divide"),
        (lambda: Graph("line", 3), "rows must be"),
        (lambda: Edges(((0, -1),)), "pairs of ranks"),
        (lambda: as_topology("circle"), "cycle"),
        (lambda: as_topology("grid:4"), "option=value"),
        (lambda: as_topology(4), "no topology"),
        (lambda: ExactDiffusion("exponential").check_ranks(8), "undirected"),
    ],
)
def test_bad_topologies(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
