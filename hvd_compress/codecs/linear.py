"""Uniform levels around zero, to the nearest: symmetric linear quantisation."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from hvd_compress.codecs.runs import ByColumn, Scaled, check_column
from hvd_compress.codecs.selector import Classes
from hvd_compress.config import checked, choice
from hvd_compress.kernels.codecs import Digits


@dataclasses.dataclass(frozen=True)
class linear(ByColumn, Scaled, name="linear"):
    """The nearest multiple of a column's scale, ``scale * round(x / scale)``, halves to even.

    The scale is the column's largest magnitude divided by L = 2^(bits - 1) - 1, so that there are
    2 L + 1 levels: 255 with 8 bits.  Nothing is random.  The error of an element is at most half of
    its column's scale, and error feedback makes up for it.

    Sent: a scale per column and ``bits`` bits per element.

    Options:
        bits: 2 to 8.
        column: see :class:`column_means`.

    >>> codec, x = linear(bits=4), np.array([7.0, 2.2, -0.6, 0.1])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 4, x.dtype)
    array([ 7.,  2., -1.,  0.])
    """

    bits: int = choice(*range(2, 9), default=8)
    column: int | None = checked(check_column, None)

    draws = False

    @functools.cached_property
    def _grid(self) -> Digits:
        largest = 2 ** (self.bits - 1) - 1
        return Digits("linear", 2 * largest + 1, largest, self.column, zero=largest)

    def _scales(self, x: np.ndarray) -> np.ndarray:
        largest = self._grid.levels
        scales = super()._scales(x) / x.dtype.type(largest)
        with np.errstate(over="ignore", invalid="ignore"):
            # What would overflow when decoded has to arrive as something that is not finite.
            scales[~np.isfinite(scales * largest)] = np.inf
        return scales

    def _rounded(
        self, x: np.ndarray, scales: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        largest = self._grid.levels
        with np.errstate(over="ignore", invalid="ignore"):
            steps = np.rint(x / np.where(scales > 0, scales, 1))
            # Scales below the normal numbers are coarse: x / scale may be more than L.
            np.fmin(np.fmax(steps, -largest, out=steps), largest, out=steps)
            return (steps + largest).astype(np.uint8)

    def classes(self, d: int) -> Classes:
        """Return the constants for columns of d elements, which follow from |C(x) - x|^2 <= e^2
        |x|^2 with e^2 = q / (1 + q), q = (d - 1) / (2 L)^2.  The worst case is elements of half a
        scale beside the largest."""
        d = min(d, self.column or d)
        q = (d - 1) / (2 * self._grid.levels) ** 2
        e = math.sqrt(q / (1 + q))
        return Classes((1 - e) ** 2, 1 + e, 1 - e, 1 + q)
