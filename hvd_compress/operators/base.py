"""The contract of an operator that picks elements."""

from __future__ import annotations

import abc
from typing import ClassVar

from hvd_compress.base import Array, Context, State
from hvd_compress.config import Configurable
from hvd_compress.errors import UnsupportedError
from hvd_compress.operator_classes import IDENTITY, Classes


class Selector(Configurable, abc.ABC, kind="block"):
    """Which elements of a flat array to send."""

    #: what the operator remembers of a tensor, arrays of any size; differs between ranks
    keys: ClassVar[tuple[str, ...]] = ()

    def init(self, x: Array) -> State:
        """The state before the first exchange of a tensor of which ``x`` is flat."""
        return {}

    @abc.abstractmethod
    def count(self, n: int, context: Context) -> int | None:
        """How many of ``n`` elements are picked, the same on all ranks; ``None`` if that depends
        on their values."""

    @abc.abstractmethod
    def select(self, x: Array, k: int | None, context: Context) -> Array:
        """Ascending indices (int64) of the flat array ``x``, ``k`` of them unless that is ``None``.
        If ``x`` has a NaN, one of them at least must be picked."""

    def pick(self, x: Array, k: int | None, state: State, context: Context) -> tuple[Array, State]:
        """The same for operators with a state, which is handed in and out, never changed."""
        return self.select(x, k, context), state

    def kept(self, d: int, context: Context) -> float:
        """The share of |x|^2 that the picked ones of ``d`` elements have, in expectation, at least
        and whatever x is."""
        raise UnsupportedError(f"no constants are known for {self.name}")

    def classes(self, d: int, context: Context | None = None) -> Classes:
        """Constants in d dimensions, for what is picked and sent as it is; ``context`` where the
        density is a schedule."""
        return IDENTITY.after_selecting(self.kept(d, context or Context()))
