"""The point at which sharpness-aware minimisation takes the gradient."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from hvd_compress.backends import Array, backend_of
from hvd_compress.errors import ConfigError
from hvd_compress.optimizers.base import check_options

#: added to norms, which may be zero
TINY = 1e-16


def option(name: str) -> Any:
    """Return an attribute that is an option of ``self.formula``, which schedules may change."""

    def put(host: Any, value: Any) -> None:
        host.formula = dataclasses.replace(host.formula, **{name: value})

    get = operator.attrgetter(f"formula.{name}")
    return property(get, put, doc=f"The option ``{name}``, which may be changed at any time.")


@dataclasses.dataclass(frozen=True)
class SAM:
    """SAM's eps = rho g / ||g||, with the norm over all tensors.

    The step is taken from w, along the gradient at w + eps.  There the loss is largest, to first
    order, in a ball of radius rho.

    Options:
        rho: radius of the ball in which the worst weights are looked for, in units of the weights.

    Reference: Foret, Kleiner, Mobahi and Neyshabur, ICLR 2021, arXiv 2010.01412.

    >>> w, g = np.array([1.0, 1.0]), np.array([3.0, 4.0])
    >>> SAM(rho=0.5).ascent([w], [g])[0].round(6)
    array([0.3, 0.4])
    """

    rho: float = 0.05

    def __post_init__(self) -> None:
        check_options({"rho": self.rho}, lambda rho: 0 < rho < math.inf, "greater than 0")

    def ascent(
        self, weights: Sequence[Array], gradients: Sequence[Array | None]
    ) -> list[Array | None]:
        """Return eps for each tensor, like its weights; ``None`` for one without a gradient.

        Raises:
            ConfigError: there is no gradient at all.
        """
        if not weights:
            return []
        xp = backend_of(weights[0])
        wide = [None if g is None else xp.widen(g) for g in gradients]
        found = [g for g in wide if g is not None]
        if not found:
            raise ConfigError(
                "SAM found no gradient: loss_of must compute the loss from these parameters"
            )
        scale = self.rho / (xp.vector_norm(found) + TINY)
        return [
            None if g is None else xp.restore(xp.scale(g, scale), w)
            for w, g in zip(weights, wide, strict=True)
        ]


def averaged(
    weights: Sequence[Array],
    gradients: Sequence[Array | None],
    average: Callable[[Array], Array],
) -> list[Array]:
    """Return averages over the ranks, of one message; what has no gradient here has zeros, since it
    may have one elsewhere."""
    xp = backend_of(weights[0])
    parts = [
        xp.widen(xp.full_like(w, 0.0) if g is None else g)
        for w, g in zip(weights, gradients, strict=True)
    ]
    dtype = "float64" if "float64" in map(xp.dtype, parts) else "float32"
    mean = average(xp.concat([xp.cast(part, dtype) for part in parts]))
    means = xp.split(mean, [xp.size(w) for w in weights])
    return [xp.reshape(part, xp.shape(w)) for part, w in zip(means, weights, strict=True)]
