"""Combination matrices: how much of each neighbour's vector a rank takes.

Row i of W has the weights of rank i's neighbours and its own, so ``x_i = sum_j w_ij x_j``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.errors import ConfigError

#: by how much sums and symmetry may be off
_ROUNDING = 1e-12


def metropolis_hastings(graph: Any) -> np.ndarray:
    """Return the Metropolis-Hastings weights of an undirected graph, ``w_ij = 1 / (1 +
    max(deg_i, deg_j))`` for neighbours, and what is left of 1 for the rank itself: symmetric and
    doubly stochastic.

    Args:
        graph: a ``networkx.Graph`` whose nodes are 0 to n - 1.
    """
    n, degree = graph.number_of_nodes(), dict(graph.degree())
    w = np.zeros((n, n))
    for i, j in graph.edges():
        w[i, j] = w[j, i] = 1 / (1 + max(degree[i], degree[j]))
    return w + np.diag(1 - w.sum(axis=1))


def equal_in_weights(graph: Any) -> np.ndarray:
    """Return the weights of a directed graph in which each node takes equally much of itself and of
    each sender.  They are doubly stochastic if all nodes have as many receivers as senders."""
    w = np.eye(graph.number_of_nodes())
    for i, j in graph.edges():
        w[j, i] = 1
    return w / w.sum(axis=1, keepdims=True)


def check_doubly_stochastic(w: np.ndarray) -> None:
    """Raise ``ConfigError`` unless rows and columns add up to 1 and nothing is negative."""
    off = max(float(np.max(np.abs(w.sum(axis=axis) - 1))) for axis in (0, 1))
    if w.min() < -_ROUNDING or off > _ROUNDING * len(w):
        raise ConfigError(
            "the weights of this topology are not doubly stochastic, so ranks would not agree on "
            f"the average: sums of rows or columns are off 1 by {off:.1e} (of float32, give a "
            "matrix in float64); give all nodes as many neighbours in as out"
        )


def check_brings_together(w: np.ndarray) -> None:
    """Raise ``ConfigError`` if the ranks of a connected graph only swap their values.  One rank
    with a weight of its own is enough to prevent it."""
    if w.diagonal().any():
        return
    if (second := second_eigenvalue(w)) > 1 - _ROUNDING * len(w):
        raise ConfigError(
            f"mixing by this matrix never brings the ranks together, since an eigenvalue beside "
            f"the 1 has a magnitude of {second:.3g}: give each rank a weight of its own, on the "
            "diagonal"
        )


def check_symmetric(w: np.ndarray, method: str) -> None:
    """Raise ``ConfigError`` unless W is symmetric."""
    if abs(w - w.T).max() > _ROUNDING:
        raise ConfigError(
            f"{method} needs an undirected topology, such as 'cycle' or 'grid': use one, or "
            "Diffusion or GradientTracking, which take directed ones"
        )


def eigenvalues(w: np.ndarray) -> np.ndarray:
    """Return the eigenvalues of W by descending magnitude, (ranks,); real ones if W is symmetric.

    Args:
        w: W, (ranks, ranks).
    """
    found = np.linalg.eigvalsh(w) if np.allclose(w, w.T, atol=1e-14) else np.linalg.eigvals(w)
    return found[np.argsort(-abs(found), kind="stable")]


def second_eigenvalue(w: np.ndarray) -> float:
    """Return the largest magnitude of an eigenvalue but the 1 of the average: a mixing brings the
    ranks together by this factor.

    Args:
        w: W, (ranks, ranks); of one rank it is 0.
    """
    return float(abs(eigenvalues(w)[1])) if len(w) > 1 else 0.0


def spectral_gap(w: np.ndarray) -> float:
    """Return 1 - :func:`second_eigenvalue` of ``w``, a fraction.

    >>> [round(spectral_gap(graph.weights(16)), 3) for graph in (Cycle(), Complete())]
    [0.051, 1.0]
    """
    return 1 - second_eigenvalue(w)
