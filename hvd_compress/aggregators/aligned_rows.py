"""One mask for all ranks, from a small sketch of their sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.aggregators.meetings import summed
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.config import check_whole, converted
from hvd_compress.operators.random_k import shared_generator
from hvd_compress.operators.top_k import count
from hvd_compress.requests import Request, Sum
from hvd_compress.schedules import Density, as_density, density_at


@dataclasses.dataclass(frozen=True)
class aligned_rows(Aggregator, name="aligned_rows"):
    """The elements are cut into rows, and every rank multiplies each of its rows with the same few
    random signs.  These products are summed over the ranks, and are the larger the larger a row of
    the sum is; so all ranks know alike which rows are largest, and sum these.

    Both are sums of as many numbers on each rank, without indices, so what a rank sends and
    receives does not grow with the number of ranks.  Elements behind the last whole row are
    always sent.

    Options:
        density: the fraction of rows that is sent, or a schedule.
        row: consecutive elements that are sent together or not at all.
        width: products of a row; their squares add up to an estimate of its square norm that has a
            relative variance of about 2 / width.

    Reference: Chen et al., ARC-Top-K, arXiv 2510.26709.  Differs from it in: rows have a length of
    their own, where those of the paper are a matrix's, and signs are in the place of normal
    numbers.

    >>> world = World(chain(via=aligned_rows(0.5, row=3, width=1)), size=2)
    >>> gradients = [np.array([4.0, 0, 0, 1.0, 0, 0]), np.array([1.0, 0, 0, 2.0, 0, 0])]
    >>> world.exchange(gradients)[0].mean
    array([2.5, 0. , 0. , 0. , 0. , 0. ])
    """

    density: Density = dataclasses.field(default=0.01, metadata=converted(as_density))
    row: int = 256
    width: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("row", self.row, 1)
        check_whole("width", self.width, 1)

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n = xp.size(x)
        rows = n // self.row
        k = count(rows, density_at(self.density, context.step, context.epoch)) if rows else 0
        sent, sketched = n - (rows - k) * self.row, rows * self.width
        if sent + sketched >= n:
            return (yield from summed(x, state, context))
        table = xp.reshape(x[: rows * self.row], (rows, self.row))
        signs = xp.on_host(
            lambda step: [self._signs(context._replace(step=int(step)))],
            [context.step],
            [("float32", self.row * self.width)],
            x,
        )[0]
        signs = xp.cast(xp.reshape(signs, (self.row, self.width)), xp.dtype(x))
        total = yield Sum(xp.reshape(xp.matmul(table, signs), (-1,)))

        def largest(total: np.ndarray) -> list[np.ndarray]:
            sketch = total.reshape(rows, self.width).astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                norms = np.square(sketch).sum(1)
            # A stable order: of rows that are alike the first ones.
            chosen = np.sort(np.argsort(-norms, kind="stable")[:k])
            first = (chosen * self.row)[:, None] + np.arange(self.row)
            return [np.concatenate([first.ravel(), np.arange(rows * self.row, n)])]

        (indices,) = xp.on_host(largest, [total], [("int64", sent)], x)
        values = xp.take(x, indices)
        summed_values = yield Sum(values)
        values_mean = xp.divided(summed_values, context.size)
        mean = xp.put(xp.zeros(n, x), indices, values_mean)
        is_finite = xp.all_finite(total) & xp.all_finite(values_mean)
        return Aggregated(mean, Sparse(indices, values), is_finite, state)

    def _signs(self, context: Context) -> np.ndarray:
        drawn = shared_generator(context).integers(0, 2, self.row * self.width)
        return (2 * drawn - 1).astype(np.float32)
