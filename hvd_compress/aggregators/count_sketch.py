"""The largest elements of the average, found in a sum of sketches."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.aggregators.meetings import summed
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.coding.sketching import Hashes, estimates, sketch
from hvd_compress.config import converted, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.operators import top_k
from hvd_compress.operators.random_k import shared_generator
from hvd_compress.operators.top_k import count
from hvd_compress.requests import Request, Sum
from hvd_compress.schedules import Density, as_density, density_at

_LARGEST = top_k(1.0, "exact")


@dataclasses.dataclass(frozen=True)
class count_sketch(Aggregator, name="count_sketch"):
    """Each rank sends a table of random sums of its elements.  From the sum of the tables all ranks
    estimate the same elements as the largest ones of the average; these candidates are summed
    exactly, and the k = ceil(density * n) largest of them are kept.

    Sent: ``rows * width * k`` numbers in one sum and ``candidates * k`` in another, however many
    ranks there are.  Where that is not less than the tensor, all of it is summed.

    Options:
        density: fraction of elements to keep, or a schedule.
        rows: of the table; odd.
        width: columns of the table for every element that is kept.
        candidates: elements that are summed exactly for every element that is kept.

    Reference: Ivkin, Rothchild et al., Communication-efficient distributed SGD with sketching,
    NeurIPS 2019.  Differs from it in: the signs and cells of elements change at every step, so two
    elements that fall on each other now will not do so next time.  See also
    ``coding/sketching.py``.

    >>> gradients = [np.zeros(1000), np.zeros(1000)]
    >>> gradients[0][7], gradients[1][7] = 5.0, 3.0
    >>> mean = World(chain(via=count_sketch(density=0.001)), size=2).exchange(gradients)[0].mean
    >>> np.flatnonzero(mean), mean[7].item()
    (array([7]), 4.0)
    """

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))
    rows: int = 5
    width: int = 10
    candidates: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("rows", "width", "candidates"):
            value = getattr(self, option)
            if not is_whole(value) or value < 1:
                raise ConfigError(f"{option} must be a number, 1 or more; got {value!r}")
        if self.rows % 2 == 0:
            raise ConfigError(f"rows must be odd, so that one is in the middle; got {self.rows}")

    def count(self, n: int, context: Context) -> int:
        """Return how many of ``n`` elements are kept: ``n`` where a sketch would not be smaller."""
        k = count(n, density_at(self.density, context.step, context.epoch))
        return k if (self.rows * self.width + self.candidates) * k < n else n

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, k = xp.size(x), self.count(xp.size(x), context)
        if k == n:
            return (yield from summed(x, state, context))
        shape, several = (self.rows, self.width * k), self.candidates * k

        def hashes(step: Any) -> Hashes:
            return Hashes.draw(n, shape, shared_generator(context._replace(step=int(step))))

        def encode(step: Any, x: np.ndarray) -> list[np.ndarray]:
            return [sketch(x, hashes(step)).reshape(-1)]

        def decode(step: Any, table: np.ndarray) -> list[np.ndarray]:
            return _largest(estimates(table.reshape(shape), hashes(step)), several)

        (table,) = xp.on_host(encode, [context.step, x], [(xp.dtype(x), shape[0] * shape[1])], x)
        total = yield Sum(table)
        (found,) = xp.on_host(decode, [context.step, total], [("int64", several)], x)
        exact = yield Sum(xp.take(x, found))
        (best,) = xp.on_host(lambda values: _largest(values, k), [exact], [("int64", k)], x)
        indices = xp.take(found, best)
        mean = xp.put(xp.zeros(n, x), indices, xp.divided(xp.take(exact, best), context.size))
        return Aggregated(mean, Sparse(indices, xp.take(x, indices)), xp.all_finite(exact))


def _largest(x: np.ndarray, k: int) -> list[np.ndarray]:
    """Ascending indices; what is not finite is larger than everything."""
    sizes = np.where(np.isfinite(x), np.abs(x), np.inf)
    return [_LARGEST.select(sizes, k, Context()).astype(np.int64, copy=False)]
