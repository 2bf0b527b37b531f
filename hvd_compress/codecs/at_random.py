"""Elements at random, and generators of random numbers: counter-based, keyed by (seed, step, tensor
name), and by the rank where ranks draw for themselves.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.codecs.selector import Classes
from hvd_compress.codecs.top_k import DensitySelector
from hvd_compress.config import converted
from hvd_compress.schedules import Density, as_density


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
class random_k(DensitySelector, name="random_k"):
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
