"""Select what is larger in magnitude than a fixed number."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.codecs.selector import Selector
from hvd_compress.config import checked, numbers

check_tau = numbers("a positive number, for instance tau=0.01", lambda tau: 0 < tau < math.inf)


@dataclasses.dataclass(frozen=True)
class threshold(Selector, name="threshold"):
    """All elements with ``|x| > tau``, however many these are: none, or all of them.

    Options:
        tau: a positive number, in units of the gradient.

    >>> threshold(tau=1.5).select(np.array([4.0, 1.0, 0.0, -2.0]), None, Context())
    array([0, 3])
    """

    tau: float = checked(check_tau)

    homogeneous = False

    def count(self, n: int, context: Context) -> None:
        return None

    def select(self, x: Array, k: int | None, context: Context) -> Array:
        xp = backend_of(x)
        if xp.traces:
            return xp.on_host(functools.partial(_beyond, self.tau), [x], [("int64", None)], x)[0]
        return xp.nonzero(~(xp.abs(x) <= self.tau))  # so written, NaN is picked


def _beyond(tau: float, x: np.ndarray) -> list[np.ndarray]:
    return [np.flatnonzero(~(np.abs(x) <= tau))]
