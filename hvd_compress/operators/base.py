"""The contract of an operator that picks elements."""

from __future__ import annotations

import abc

from hvd_compress.base import Array, Context
from hvd_compress.classes import IDENTITY, Classes
from hvd_compress.config import Configurable


class Selector(Configurable, abc.ABC, kind="block"):
    """Which elements of a flat array to send."""

    @property
    def needs_epoch(self) -> bool:
        return False

    @abc.abstractmethod
    def count(self, n: int, context: Context) -> int | None:
        """How many of ``n`` elements are picked, the same on all ranks; ``None`` if that depends
        on their values."""

    @abc.abstractmethod
    def select(self, x: Array, k: int | None, context: Context) -> Array:
        """Ascending indices (int64) of the flat array ``x``, ``k`` of them unless that is ``None``.
        If ``x`` has a NaN, one of them at least must be picked."""

    def kept(self, d: int, context: Context) -> float:
        """The share of |x|^2 that the picked ones of ``d`` elements have, in expectation, at least
        and whatever x is."""
        raise NotImplementedError(f"no constants are known for {self.name}")

    def classes(self, d: int, context: Context | None = None) -> Classes:
        """Constants in d dimensions, for what is picked and sent as it is; ``context`` where the
        density is a schedule."""
        return IDENTITY.after_selecting(self.kept(d, context or Context()))
