"""Select what is larger in magnitude than a fixed number."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.config import is_number
from hvd_compress.errors import ConfigError
from hvd_compress.operators.base import Selector


def check_tau(tau: Any) -> None:
    if not is_number(tau) or not 0 < tau < math.inf:
        raise ConfigError(f"tau must be a positive number, for instance tau=0.01; got {tau!r}")


@dataclasses.dataclass(frozen=True)
class threshold(Selector, name="threshold"):
    """All elements with ``|x| > tau``, however many these are: none, or all of them.

    Options:
        tau: a positive number, in units of the gradient.

    >>> threshold(tau=1.5).select(np.array([4.0, 1.0, 0.0, -2.0]), None, Context())
    array([0, 3])
    """

    tau: float

    homogeneous = False

    def __post_init__(self) -> None:
        check_tau(self.tau)

    def count(self, n: int, context: Context) -> None:
        return None

    def select(self, x: Array, k: int | None, context: Context) -> Array:
        xp = backend_of(x)
        if xp.traces:
            return xp.on_host(functools.partial(_beyond, self.tau), [x], [("int64", None)], x)[0]
        return xp.nonzero(~(xp.abs(x) <= self.tau))  # so written, NaN is picked


def _beyond(tau: float, x: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(~(np.abs(x) <= tau))]
