"""The contract of an operator that picks elements."""

from __future__ import annotations

import abc

from hvd_compress.base import Array, Context
from hvd_compress.config import Configurable
from hvd_compress.errors import UnsupportedError
from hvd_compress.operators.classes import IDENTITY, Classes


class Selector(Configurable, abc.ABC, kind="block"):
    """An operator: which elements of a flat array to send.  Subclasses are frozen dataclasses.

    >>> select, x = top_k(density=0.5), np.array([4.0, 1.0, 0.0, -2.0])
    >>> k = select.count(x.size, Context())
    >>> k, select.select(x, k, Context()), select.kept(x.size, Context())
    (2, array([0, 3]), 0.5)
    """

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
