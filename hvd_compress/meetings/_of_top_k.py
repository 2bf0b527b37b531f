"""The base of aggregators that begin with the largest elements of one rank."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Generator
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.config import converted
from hvd_compress.meetings.ways import summed
from hvd_compress.operators import top_k
from hvd_compress.requests import Request
from hvd_compress.schedules import Density, as_density


@dataclasses.dataclass(frozen=True)
class OfTopK(Aggregator):
    """An aggregator of k = ceil(density * n) elements; of all, it is a sum."""

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._select  # checks the options

    @property
    def _select(self) -> top_k:
        return top_k(self.density)

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        n = backend_of(x).size(x)
        k = self._select.count(n, context)
        if k == n:
            return (yield from summed(x, state, context))
        return (yield from self._aggregate_top_k(x, k, state, context))

    @abc.abstractmethod
    def _aggregate_top_k(
        self, x: Array, k: int, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        """The same as :meth:`aggregate`, for ``k`` elements that are fewer than all."""
