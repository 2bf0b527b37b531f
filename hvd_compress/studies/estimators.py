"""Gradients of a finite sum with less and less noise, for one node.

With a constant learning rate, noisy gradients leave a decentralised method in a ball around the
solution; with these it converges to the solution itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: ``gradient(x, l)`` is that of the l-th of m functions, whose mean is the node's
Gradient = Callable[[np.ndarray, int], np.ndarray]


class LSVRG:
    """``G = g_l(x) - g_l(xr) + mean g(xr)`` with a random l; ``xr = x`` with probability 1 / m.

    Args:
        gradient: of one of the functions.
        m: their number.
        random: what l is drawn from.

    Reference: Kovalev, Horvath, Richtarik, ALT 2020.
    """

    def __init__(self, gradient: Gradient, m: int, random: np.random.Generator) -> None:
        self._gradient, self._m, self._random = gradient, m, random
        self._reference: tuple[np.ndarray, np.ndarray] | None = None  # xr, and the mean there

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the estimate at ``x``; the first one is exact."""
        reference, mean = self._reference = self._reference or self._at(x)
        draw = int(self._random.integers(self._m))
        estimate = self._gradient(x, draw) - self._gradient(reference, draw) + mean
        if self._random.random() < 1 / self._m:
            self._reference = self._at(x)
        return estimate

    def _at(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x.copy(), np.mean([self._gradient(x, i) for i in range(self._m)], axis=0)
