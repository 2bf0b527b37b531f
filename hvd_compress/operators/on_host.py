"""Operators that look for their elements in NumPy, the same for all frameworks."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.config import converted
from hvd_compress.operators.base import Selector
from hvd_compress.operators.top_k import count
from hvd_compress.schedules import Density, as_density, density_at


@dataclasses.dataclass(frozen=True)
class HostSelector(Selector):
    """Options: ``density``, a fraction or a schedule."""

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))

    def count(self, n: int, context: Context) -> int | None:
        return None

    @abc.abstractmethod
    def find(
        self, x: np.ndarray, k: int, context: Context, *memory: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Return ascending indices of about ``k`` elements of ``x``, which is finite, flat and not
        empty; behind them the new arrays of the state, for those in ``memory``, which must not be
        changed in place."""

    def select(self, x: Array, k: int | None, context: Context) -> Array:
        return self.pick(x, k, self.init(x), context)[0]

    def pick(self, x: Array, k: int | None, state: State, context: Context) -> tuple[Array, State]:
        xp = backend_of(x)
        n = xp.size(x)
        wanted = count(n, density_at(self.density, context.step, context.epoch)) if k is None else k
        dtype = xp.dtype(x)

        def work(step: Any, x: np.ndarray, *memory: np.ndarray) -> list[np.ndarray]:
            finite = np.isfinite(x)
            if not finite.all():  # to be seen by all ranks, and then forgotten
                first = np.argsort(finite, kind="stable")[: 1 if k is None else k]
                return [np.sort(first).astype(np.int64), *memory]
            if not wanted:
                return [np.zeros(0, np.int64), *memory]
            found = self.find(x, wanted, context._replace(step=int(step)), *memory)
            return [found[0].astype(np.int64, copy=False), *found[1:]]

        indices, *memory = xp.on_host(
            work,
            [context.step, x, *(state[key] for key in self.keys)],
            [("int64", k), *((dtype, xp.size(state[key])) for key in self.keys)],
            x,
        )
        return indices, dict(zip(self.keys, memory, strict=True))
