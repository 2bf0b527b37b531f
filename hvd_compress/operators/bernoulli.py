"""Select every element with a probability of its own (Beznosikov et al., JMLR 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.config import check_fraction, converted
from hvd_compress.errors import ConfigError
from hvd_compress.operators.base import Selector
from hvd_compress.operators.random_k import own_generator


def _as_tuple(probability: Any) -> Any:
    return tuple(probability) if isinstance(probability, list) else probability


@dataclasses.dataclass(frozen=True)
class bernoulli(Selector, name="bernoulli"):
    """Element i with probability p_i, sent as it is, whatever becomes of the others; each rank
    draws for itself.  How many are sent differs from step to step.

    Options:
        probability: in (0, 1], of every element, or a tuple with one for each element of the
            tensor.

    Reference: Beznosikov, Horvath, Richtarik, Safaryan, JMLR 2023, where biased random
    sparsification is for any random set of elements; here they are drawn one by one.

    >>> x = np.array([8.0, 1.0, 2.0, 1.0])
    >>> [bernoulli(probability=0.5).select(x, None, Context(step=s)).tolist() for s in range(3)]
    [[0, 1, 2, 3], [0, 1], [3]]
    """

    probability: float | tuple[float, ...] = dataclasses.field(
        default=0.01, metadata=converted(_as_tuple)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        p = self.probability
        for each in p if isinstance(p, tuple) else (p,):
            check_fraction("probability", each)
        if p == ():
            raise ConfigError("probability must not be empty: give one number, or one an element")

    def count(self, n: int, context: Context) -> None:
        return None

    def kept(self, d: int, context: Context) -> float:
        """Return the least probability, which is attained where x is zero elsewhere."""
        return float(self._probabilities(d).min())

    def _probabilities(self, n: int) -> np.ndarray:
        p = np.atleast_1d(self.probability)
        if p.size not in (1, n):
            raise ConfigError(
                f"probability has {p.size} entries for a tensor of {n} elements: give one number, "
                "or one an element"
            )
        return p

    def select(self, x: Array, k: int | None, context: Context) -> Array:
        xp = backend_of(x)
        probabilities = self._probabilities(xp.size(x))

        def draw(step: int, x: np.ndarray) -> list[np.ndarray]:
            # Other numbers than those of a codec behind, which begins with turn 0.
            random = own_generator(context._replace(step=step), turn=-1)
            # What is not finite must reach the others.
            chosen = (random.random(x.size) < probabilities) | ~np.isfinite(x)
            return [np.flatnonzero(chosen).astype(np.int64)]

        return xp.on_host(draw, [context.step, x], [("int64", None)], x)[0]
