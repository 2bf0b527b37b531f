"""Proximal operators: ``prox_{eta r}(v) = argmin_x r(x) + |x - v|^2 / (2 eta)``, by element."""

from __future__ import annotations

import abc
import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import Configurable, check_between


class Proximal(Configurable, abc.ABC, kind="proximal"):
    """A regulariser r that need not be smooth."""

    @abc.abstractmethod
    def __call__(self, v: Array, eta: float) -> Array:
        """Return prox_{eta r}(v), of any shape."""


@dataclasses.dataclass(frozen=True)
class l1(Proximal, name="l1"):
    """r(x) = weight |x|_1: magnitudes shrink by eta * weight.

    An operator is called with an array v of floats, of any shape, and a step eta; it raises
    ``ConfigError`` when it is made with options that make no sense.

    Args:
        weight: 0 or more.

    >>> l1(weight=1.0)(np.array([-2.0, 0.05, 1.0]), eta=0.1)
    array([-1.9,  0. ,  0.9])
    """

    weight: float

    def __post_init__(self) -> None:
        check_between("weight", self.weight, 0)

    def __call__(self, v: Array, eta: float) -> Array:
        xp, by = backend_of(v), eta * self.weight
        zero = xp.full_like(v, 0.0)
        return xp.maximum(v - by, zero) - xp.maximum(-v - by, zero)
