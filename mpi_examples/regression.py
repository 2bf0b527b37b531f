"""A convex problem of several ranks: softmax regression on scikit-learn's digits."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import minimize
from sklearn.datasets import load_digits


class Regression:
    """Multinomial logistic regression with an L2 term: 65 x 10 weights.

    Args:
        ranks: each has as many images.
        split: "shuffled", or "labels" for few kinds of digits on a rank.
        l2: weight of the regulariser, which is also mu.

    Attributes:
        smoothness: L of the mean of the ranks' functions.
        own_smoothness: the root of the mean square of the L of the ranks' functions.
        largest_smoothness: the largest of them.
        least, most: the minimum, and the value at ``start``.
    """

    def __init__(self, ranks: int, split: str = "shuffled", l2: float = 0.05) -> None:
        x, labels = load_digits(return_X_y=True)
        x = (x - x.mean()) / x.std()
        x = np.column_stack([x, np.ones(len(x))])
        order = np.random.default_rng(0).permutation(len(x))
        if split == "labels":
            order = np.argsort(labels, kind="stable")
        order = order[: len(x) // ranks * ranks]
        self.ranks, self.l2 = ranks, l2
        self.x = x[order].reshape(ranks, -1, 65)
        self.y = np.eye(10)[labels[order]].reshape(ranks, -1, 10)
        # The Hessian of the softmax is at most 1/2.
        grams = np.einsum("rna,rnb->rab", self.x, self.x) / self.x.shape[1]
        own = np.linalg.eigvalsh(grams)[:, -1] / 2 + l2
        self.own_smoothness = math.sqrt(np.mean(own**2))
        self.largest_smoothness = float(own.max())
        self.smoothness = float(np.linalg.eigvalsh(grams.mean(0))[-1]) / 2 + l2
        self.d = 650
        self.start = np.zeros(self.d)
        found = minimize(
            lambda w: (self.value(w), self.mean_gradient(w)),
            self.start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-10},
        )
        self.least, self.most = found.fun, self.value(self.start)

    def value(self, w: np.ndarray) -> float:
        z = self.x @ w.reshape(65, 10)
        top = z.max(2)
        log_sum = np.log(np.exp(z - top[..., None]).sum(2)) + top
        return float((log_sum - (z * self.y).sum(2)).mean() + self.l2 / 2 * w @ w)

    def gradient(self, w: np.ndarray, rank: int, images: slice = slice(None)) -> np.ndarray:
        """Of one rank's part, or of some of its images."""
        x, y = self.x[rank, images], self.y[rank, images]
        z = x @ w.reshape(65, 10)
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return (x.T @ (p - y) / len(x)).reshape(-1) + self.l2 * w

    def mean_gradient(self, w: np.ndarray) -> np.ndarray:
        return np.mean([self.gradient(w, rank) for rank in range(self.ranks)], axis=0)

    def error(self, w: np.ndarray) -> float:
        """How much of f(start) - f(best) is left."""
        return (self.value(w) - self.least) / (self.most - self.least)
