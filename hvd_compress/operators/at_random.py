"""Elements at random, and generators of random numbers: counter-based, keyed by (seed, step, tensor
name), and by the rank where ranks draw for themselves.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.config import check_fraction, converted
from hvd_compress.errors import ConfigError
from hvd_compress.operators.base import Classes, Selector
from hvd_compress.operators.top_k import count
from hvd_compress.schedules import Density, as_density, density_at


def shared_generator(context: Context) -> np.random.Generator:
    """Return a generator of random numbers that are the same on all ranks, and others for every
    step and tensor."""
    return _generator(f"{context.seed}/{int(context.step)}/{context.name}")


def own_generator(context: Context, turn: int = 0) -> np.random.Generator:
    """Return a generator of random numbers that are others for every rank, step and tensor, and for
    every ``turn`` within a step."""
    return _generator(
        f"{context.seed}/{int(context.step)}/{context.name}/rank {context.rank}/{turn}"
    )


def _generator(label: str) -> np.random.Generator:
    key = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))


@dataclasses.dataclass(frozen=True)
class random_k(Selector, name="random_k"):
    """k = ceil(density * n) elements at random, the same ones on all ranks, others in every step.

    They are drawn by a generator that is keyed by seed, step and name of the tensor, so no indices
    need be sent.  A run that goes on from a checkpoint draws the same ones.

    Options:
        density: a fraction or a schedule.

    Reference: Wangni et al.; Stich et al., both NeurIPS 2018.

    >>> select, x = random_k(density=0.5), np.zeros(6)
    >>> k = select.count(x.size, Context())
    >>> [select.select(x, k, Context(step=step)).tolist() for step in range(2)]
    [[3, 4, 5], [2, 3, 5]]
    """

    density: Density = dataclasses.field(default=0.01, metadata=converted(as_density))

    def count(self, n: int, context: Context) -> int:
        return count(n, density_at(self.density, context.step, context.epoch))

    def kept(self, d: int, context: Context) -> float:
        """Return k/d: every element is drawn with that probability."""
        return self.count(d, context) / d

    def scaled_classes(self, d: int, context: Context | None = None) -> Classes:
        """Return the constants of the selected elements scaled by d/k: unbiased, with a second
        moment of exactly d/k."""
        zeta = 1 / self.kept(d, context or Context())
        return Classes.unbiased(zeta, alpha=zeta)

    def draw(self, n: int, k: int | None, random: np.random.Generator) -> np.ndarray:
        """Return ascending indices (int64) of ``k`` out of ``n`` elements."""
        return np.sort(random.choice(n, k, replace=False, shuffle=False)).astype(np.int64)

    def select(self, x: Array, k: int | None, context: Context) -> Array:
        xp = backend_of(x)
        n = xp.size(x)

        def draw(step: int) -> list[np.ndarray]:
            return [self.draw(n, k, shared_generator(context._replace(step=step)))]

        return xp.on_host(draw, [context.step], [("int64", k)], x)[0]


def _as_tuple(probability: Any) -> Any:
    return tuple(probability) if isinstance(probability, list) else probability


@dataclasses.dataclass(frozen=True)
class bernoulli(Selector, name="bernoulli"):
    """Element i with probability p_i, sent as it is, whatever becomes of the others; each rank
    draws for itself.

    Options:
        probability: in (0, 1], of every element, or a tuple with one for each of the tensor.

    Reference: Beznosikov, Horvath, Richtarik, Safaryan, JMLR 2023, for any random set of elements.

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
            raise ConfigError("probability must not be empty: give one number, or one per element")

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
                "or one per element"
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


@dataclasses.dataclass(frozen=True)
class adaptive_random(Selector, name="adaptive_random"):
    """Element i with probability |x_i| / |x|_1, sent as it is; each rank draws for itself.

    It keeps sum |x_i|^3 / |x|_1 of the energy |x|^2 in expectation, at least 1/d of it, like the
    largest element.  Biased: small elements are rarely sent.

    Reference: Beznosikov, Horvath, Richtarik, Safaryan, JMLR 2023.

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
