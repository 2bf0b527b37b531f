"""One rank after the other says which elements all ranks send."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Sparse, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.config import converted
from hvd_compress.meetings._leader import Selection, leaders_choice
from hvd_compress.meetings.elements import elements
from hvd_compress.meetings.ways import summed
from hvd_compress.meetings.whole import whole
from hvd_compress.operators import top_k
from hvd_compress.requests import Request, Sum
from hvd_compress.schedules import Density, as_density


@dataclasses.dataclass(frozen=True)
class leader_top_k(Aggregator, name="leader_top_k"):
    """The leader, rank ``step mod N``, sends the indices of the k = ceil(density * n) elements that
    are largest on it to all; the values of all ranks there are summed.

    Only the leader's message has a content, so what a rank sends and receives does not grow with
    the number of ranks.

    Options:
        density: a fraction or a schedule.

    Reference: Chen et al., ScaleCom, NeurIPS 2020, where it is called CLT-k.

    >>> world = World(chain(via=leader_top_k(0.25)), size=2)
    >>> gradients = [np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])]
    >>> [world.exchange(gradients)[0].mean.tolist() for step in range(2)]
    [[2.5, 0.0, 0.0, 0.0], [0.0, 0.0, 3.0, 0.0]]
    """

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))

    @property
    def _select(self) -> top_k:
        return top_k(self.density)

    def coding(self, n: int, context: Context) -> Coding:
        return whole() if self._select.count(n, context) == n else elements(self._select)

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        k = self._select.count(xp.size(x), context)
        if k == xp.size(x):
            return (yield from summed(x, state, context))
        (indices,), _ = yield from leaders_choice([Selection(self._select, x, k, context)])
        values = xp.take(x, indices)
        total = yield Sum(values)
        values_mean = xp.divided(total, context.size)
        mean = xp.put(xp.zeros(xp.size(x), x), indices, values_mean)
        return Aggregated(mean, Sparse(indices, values), xp.all_finite(values_mean))
