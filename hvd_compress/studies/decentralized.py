"""Steady states of decentralised methods on quadratic functions.

The functions are f_k(x) = (x - b_k)^2 / 2 on node k, with gradient noise of variance s^2.  The mean
squared distance of the nodes from the minimum, mean b, has closed forms in the steady state.  With
the eigenvalues lam_j of W and a_j = (1 + lam_j) / 2:

=================  ====================================================================
diffusion, bias    (1/n) |x_fix - mean b|^2,  x_fix = mu (I - (1 - mu) W)^-1 W b
diffusion, noise   (1/n) sum mu^2 s^2 lam_j^2 / (1 - (1 - mu)^2 lam_j^2)
exact diffusion    (1/n) sum 2 a_j^2 mu^2 s^2 / ((1 - a_j (1 - mu)) (1 + a_j (3 - 2 mu)))
=================  ====================================================================
"""

from __future__ import annotations

import numpy as np

from hvd_compress.systems.topologies import eigenvalues


def diffusion_fixed_point(w: np.ndarray, b: np.ndarray, mu: float) -> np.ndarray:
    """Return where ATC diffusion ends without noise, (n,)."""
    return mu * np.linalg.solve(np.eye(len(w)) - (1 - mu) * w, w @ b)


def diffusion_msd(w: np.ndarray, b: np.ndarray, mu: float, variance: float) -> tuple[float, float]:
    """Return the mean squared distance of ATC diffusion that is due to bias and to noise."""
    bias = np.mean((diffusion_fixed_point(w, b, mu) - b.mean()) ** 2)
    squares = eigenvalues(w).real ** 2
    noise = np.mean(mu**2 * variance * squares / (1 - (1 - mu) ** 2 * squares))
    return float(bias), float(noise)


def exact_diffusion_msd(w: np.ndarray, mu: float, variance: float) -> float:
    """Return the mean squared distance of exact diffusion, which is due to noise alone."""
    a = (1 + eigenvalues(w).real) / 2
    terms = 2 * a**2 * mu**2 * variance / ((1 - a * (1 - mu)) * (1 + a * (3 - 2 * mu)))
    return float(terms.mean())
