"""Gradients of a finite sum with less and less noise: LSVRG and SAGA, for one node.

With a constant learning rate, noisy gradients leave a decentralised method in a ball around the
solution; with these it converges to the solution itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hvd_compress.config import check_fraction
from hvd_compress.errors import ConfigError

#: ``gradient(x, l)`` is that of the l-th of m functions, whose mean is the node's
Gradient = Callable[[np.ndarray, int], np.ndarray]


class LSVRG:
    """``G = (g_l(x) - g_l(xr)) / (m p_l) + mean g(xr)``; ``xr = x`` with some probability.

    Args:
        gradient: of one of the functions.
        m: their number.
        random: what l is drawn from.
        refresh: the probability of xr = x; ``None`` for 1 / m.
        p: the probability of each l; ``None`` for 1 / m each.

    Reference: Kovalev, Horvath, Richtarik, ALT 2020.
    """

    def __init__(
        self,
        gradient: Gradient,
        m: int,
        random: np.random.Generator,
        refresh: float | None = None,
        p: np.ndarray | None = None,
    ) -> None:
        self._gradient, self._m, self._random = gradient, m, random
        self._refresh = 1 / m if refresh is None else refresh
        check_fraction("refresh", self._refresh)
        self._p = _probabilities(m, p)
        self._reference: np.ndarray | None = None
        self._mean: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the estimate at ``x``; the first one is exact."""
        if self._reference is None or self._mean is None:
            self._move(x)
        assert self._reference is not None
        assert self._mean is not None
        draw = int(self._random.choice(self._m, p=self._p))
        change = self._gradient(x, draw) - self._gradient(self._reference, draw)
        estimate = change / (self._m * self._p[draw]) + self._mean
        if self._random.random() < self._refresh:
            self._move(x)
        return estimate

    def _move(self, x: np.ndarray) -> None:
        self._reference = x.copy()
        self._mean = np.mean([self._gradient(x, i) for i in range(self._m)], axis=0)


class SAGA:
    """``G = (g_l(x) - t_l) / (m p_l) + mean t``; then ``t_l = g_l(x)``.

    Args:
        gradient, m, random, p: see :class:`LSVRG`.

    Reference: Defazio, Bach, Lacoste-Julien, NeurIPS 2014.
    """

    def __init__(
        self,
        gradient: Gradient,
        m: int,
        random: np.random.Generator,
        p: np.ndarray | None = None,
    ) -> None:
        self._gradient, self._m, self._random = gradient, m, random
        self._p = _probabilities(m, p)
        self._table: np.ndarray | None = None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the estimate at ``x``; the first one is exact, and fills the table."""
        if self._table is None:
            self._table = np.stack([self._gradient(x, i) for i in range(self._m)])
        draw = int(self._random.choice(self._m, p=self._p))
        fresh = self._gradient(x, draw)
        change = (fresh - self._table[draw]) / (self._m * self._p[draw])
        estimate = change + self._table.mean(axis=0)
        self._table[draw] = fresh
        return estimate


def _probabilities(m: int, p: np.ndarray | None) -> np.ndarray:
    found = np.full(m, 1 / m) if p is None else np.asarray(p, float)
    if found.shape != (m,) or found.min() <= 0 or abs(found.sum() - 1) > 1e-9:
        raise ConfigError(f"p must be {m} positive numbers that add up to 1; got {p!r}")
    return found
