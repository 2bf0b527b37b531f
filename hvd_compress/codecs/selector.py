"""The contract of an operator that picks elements, and how much an operator changes a vector."""

from __future__ import annotations

import abc
from typing import NamedTuple

from hvd_compress.base import Array, Context
from hvd_compress.config import Configurable
from hvd_compress.errors import UnsupportedError


class Classes(NamedTuple):
    """Constants of an operator C on R^d, as Beznosikov et al. (JMLR 2023) define them::

        B1  alpha |x|^2 <= E|C(x)|^2 <= beta <E C(x), x>
        B2  max(gamma |x|^2, E|C(x)|^2 / beta) <= <E C(x), x>
        B3  E|C(x) - x|^2 <= (1 - 1/delta) |x|^2
        U   E C(x) = x  and  E|C(x)|^2 <= zeta |x|^2

    ``None``: it is not in that class, whatever the constant.  In U, ``delta`` is that of C / zeta,
    the scaling that error feedback needs.

    >>> top_k(density=0.04).classes(d=100)
    Classes(alpha=0.04, beta=1.0, gamma=0.04, delta=25.0, zeta=None)
    >>> natural().classes(d=100).zeta
    1.125
    """

    alpha: float
    beta: float
    gamma: float
    delta: float | None = None
    zeta: float | None = None

    @classmethod
    def unbiased(cls, zeta: float, alpha: float = 1.0) -> Classes:
        """Return the constants of an operator in U(zeta) with a second moment of ``alpha`` |x|^2 or
        more."""
        return cls(alpha, zeta, 1.0, zeta, zeta)

    @property
    def own_delta(self) -> float | None:
        """``delta`` of C as it is, unscaled: an operator in U has E|C(x) - x|^2 <= (zeta - 1)|x|^2,
        which is less than |x|^2 only for zeta < 2."""
        if self.zeta is None:
            return self.delta
        return 1 / (2 - self.zeta) if self.zeta < 2 else None

    def after_selecting(self, share: float) -> Classes:
        """Return the constants of this operator applied to some elements only, which keep
        ``share`` of |x|^2 or more in expectation, while the others become zero::

            <C(x), x> = <D(y), y>   and   |C(x) - x|^2 = |D(y) - y|^2 + |x|^2 - |y|^2

        for D this operator and y what was selected.  ``delta`` is that of D as it is; that of D
        scaled by 1 / zeta is what ``contraction(D)`` has.
        """
        delta = self.own_delta
        return Classes(
            self.alpha * share,
            self.beta,
            self.gamma * share,
            None if delta is None else delta / share,
        )


#: of what arrives as it was
IDENTITY = Classes.unbiased(1.0)


class Selector(Configurable, abc.ABC, kind="block"):
    """An operator: which elements of a flat array to send.  Subclasses are frozen dataclasses.

    >>> select, x = top_k(density=0.5), np.array([4.0, 1.0, 0.0, -2.0])
    >>> k = select.count(x.size, Context())
    >>> k, select.select(x, k, Context()), select.kept(x.size, Context())
    (2, array([0, 3]), 0.5)
    """

    is_coarse = True

    @abc.abstractmethod
    def count(self, n: int, context: Context) -> int | None:
        """Return how many of ``n`` elements are selected, the same number on all ranks; ``None`` if
        that depends on their values."""

    @abc.abstractmethod
    def select(self, x: Array, k: int | None, context: Context) -> Array:
        """Return ascending indices (int64) into the flat array ``x``: ``k`` of them, or as many as
        there are if ``k`` is ``None``.  If ``x`` has a NaN, at least one NaN must be among the
        selected elements."""

    def kept(self, d: int, context: Context) -> float:
        """Return the share of |x|^2 that the selected ones of ``d`` elements have at least, in
        expectation and for any x."""
        raise UnsupportedError(f"no constants are known for {self.name}")

    def classes(self, d: int, context: Context | None = None) -> Classes:
        """Return the constants in d dimensions of an operator that sends the selected elements as
        they are.  ``context`` says the step where the density is a schedule."""
        return IDENTITY.after_selecting(self.kept(d, context or Context()))
