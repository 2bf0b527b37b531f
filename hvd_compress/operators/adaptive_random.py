"""Select one element, the larger the likelier (Beznosikov et al., JMLR 2023)."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.operators.base import Selector
from hvd_compress.operators.random_k import own_generator


@dataclasses.dataclass(frozen=True)
class adaptive_random(Selector, name="adaptive_random"):
    """Element i with probability |x_i| / |x|_1, sent as it is; each rank draws for itself.

    It keeps sum |x_i|^3 / |x|_1 of the energy |x|^2 in expectation, at least 1/d of it, like the
    largest element, and more than a uniform draw; without looking for the largest.  Biased: small
    elements are rarely sent.

    Reference: Beznosikov, Horvath, Richtarik, Safaryan, JMLR 2023.

    The element of 8 with a probability of 0.8:

    >>> x = np.array([8.0, 1.0, 0.0, 1.0])
    >>> [adaptive_random().select(x, 1, Context(step=step)).item() for step in range(8)]
    [0, 0, 3, 0, 0, 0, 0, 1]
    """

    def count(self, n: int, context: Context) -> int:
        return min(n, 1)

    def kept(self, d: int, context: Context) -> float:
        """Return 1/d, which is attained where all elements are equally large."""
        return 1 / d

    def select(self, x: Array, k: int | None, context: Context) -> Array:
        def draw(step: int, x: np.ndarray) -> list[np.ndarray]:
            # Other numbers than those of a codec behind, which begins with turn 0.
            random = own_generator(context._replace(step=step), turn=-1)
            return [np.array([_draw(x, random)][:k], np.int64)]

        return backend_of(x).on_host(draw, [context.step, x], [("int64", k)], x)[0]


def _draw(x: np.ndarray, random: np.random.Generator) -> int:
    size = np.abs(x).astype(np.float64)
    largest = np.max(size, initial=0)
    if not 0 < largest < np.inf:
        return int(np.argmax(size)) if size.size else 0  # of NaN and Inf the first; or all are 0
    ends = np.cumsum(size / largest)
    chosen = int(np.searchsorted(ends, random.random() * ends[-1], side="right"))
    # The product may have been rounded up to the very end.
    return min(chosen, int(np.flatnonzero(size)[-1]))
