"""One rank after the other says which elements all ranks send."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from hvd_compress.aggregators._leader import leaders_choice
from hvd_compress.backend import backend_of
from hvd_compress.base import Array, Context, Request, Sparse, State, Sum
from hvd_compress.chain import Aggregator, Met
from hvd_compress.operators import top_k
from hvd_compress.schedules import Density


@dataclasses.dataclass(frozen=True)
class leader_top_k(Aggregator, name="leader_top_k"):
    """The leader, rank ``step mod N``, sends the indices of the k = ceil(density * n) elements that
    are largest on it to all; the values of all ranks there are summed.

    Only the leader's message has a content, so what a rank sends and receives does not grow with
    the number of ranks.

    Options:
        density: a fraction or a schedule.
        selection: "sampled" or "exact"; the same elements, found in two ways.

    Reference: Chen et al., ScaleCom, NeurIPS 2020, where it is called CLT-k.
    """

    density: Density = 0.001
    selection: str = "sampled"

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", self._select.density)  # checks the options

    @property
    def _select(self) -> top_k:
        return top_k(self.density, self.selection)

    @property
    def needs_epoch(self) -> bool:
        return self._select.needs_epoch

    def meet(self, x: Array, state: State, context: Context) -> Generator[Request, Any, Met]:
        xp = backend_of(x)
        n, k = xp.size(x), self._select.count(xp.size(x), context)
        if k == n:
            total = yield Sum(x)
            mean = total / context.size
            return Met(mean, x, xp.all_finite(mean))

        indices, _ = yield from leaders_choice(self._select, x, k, context)
        values = xp.take(x, indices)
        total = yield Sum(values)
        values_mean = total / context.size
        mean = xp.put(xp.zeros(n, x), indices, values_mean)
        return Met(mean, Sparse(indices, values), xp.all_finite(values_mean))
