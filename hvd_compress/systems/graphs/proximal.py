"""Proximal operators: ``prox_{eta r}(v) = argmin_x r(x) + |x - v|^2 / (2 eta)``, by element."""

from __future__ import annotations

import abc
import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.config import Configurable, check_between, is_number
from hvd_compress.errors import ConfigError


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
        return _shrunk(v, eta * self.weight)


@dataclasses.dataclass(frozen=True)
class l2(Proximal, name="l2"):
    """r(x) = weight / 2 |x|_2^2: division by 1 + eta * weight.

    Args:
        weight: 0 or more.

    >>> l2(weight=10.0)(np.array([-2.0, 0.05, 1.0]), eta=0.1)
    array([-1.   ,  0.025,  0.5  ])
    """

    weight: float

    def __post_init__(self) -> None:
        check_between("weight", self.weight, 0)

    def __call__(self, v: Array, eta: float) -> Array:
        return v / (1 + eta * self.weight)


@dataclasses.dataclass(frozen=True)
class elastic_net(Proximal, name="elastic_net"):
    """r(x) = absolute |x|_1 + square / 2 |x|_2^2: shrinking first, then the division.

    Args:
        absolute, square: 0 or more.

    >>> elastic_net(absolute=1.0, square=10.0)(np.array([-2.0, 0.05, 1.0]), eta=0.1)
    array([-0.95,  0.  ,  0.45])
    """

    absolute: float
    square: float

    def __post_init__(self) -> None:
        check_between("absolute", self.absolute, 0)
        check_between("square", self.square, 0)

    def __call__(self, v: Array, eta: float) -> Array:
        return _shrunk(v, eta * self.absolute) / (1 + eta * self.square)


@dataclasses.dataclass(frozen=True)
class box(Proximal, name="box"):
    """r(x) = 0 where low <= x <= high, and infinite elsewhere: the nearest point there.

    Args:
        low, high: the bounds of each element, low <= high.

    >>> box(low=0.0, high=1.0)(np.array([-2.0, 0.05, 3.0]), eta=0.1)
    array([0.  , 0.05, 1.  ])
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not (is_number(self.low) and is_number(self.high) and self.low <= self.high):
            raise ConfigError(f"box({self.low!r}, {self.high!r}) must be numbers, low <= high")

    def __call__(self, v: Array, eta: float) -> Array:
        xp = backend_of(v)
        at_least = xp.maximum(v, xp.full_like(v, self.low))
        return -xp.maximum(-at_least, xp.full_like(v, -self.high))


def _shrunk(v: Array, by: float) -> Array:
    xp = backend_of(v)
    zero = xp.full_like(v, 0.0)
    return xp.maximum(v - by, zero) - xp.maximum(-v - by, zero)
