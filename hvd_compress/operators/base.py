"""The contract of an operator that picks elements."""

from __future__ import annotations

import abc

from hvd_compress.base import Array, Context
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
