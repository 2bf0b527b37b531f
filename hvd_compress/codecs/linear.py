"""Uniform levels around zero, to the nearest: symmetric linear quantisation."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from hvd_compress.codecs import buckets
from hvd_compress.codecs.columns import Columns
from hvd_compress.config import check_choice
from hvd_compress.kernels.bitpacking import digits_size, pack_digits, unpack_digits
from hvd_compress.kernels.codecs import Digits
from hvd_compress.operators.classes import Classes


@dataclasses.dataclass(frozen=True)
class linear(Columns, name="linear"):
    """The nearest multiple of a column's scale, ``scale * round(x / scale)``, halves to even.

    The scale is the column's largest magnitude divided by L = 2^(bits - 1) - 1, so that there are
    2 L + 1 levels: 255 with 8 bits.  Nothing is random.  The error of an element is at most half of
    its column's scale, and error feedback makes up for it.

    Sent: a scale a column and ``bits`` bits an element.

    Options:
        bits: 2 to 8.
        column: see :class:`column_means`.

    >>> codec, x = linear(bits=4), np.array([7.0, 2.2, -0.6, 0.1])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 4, x.dtype)
    array([ 7.,  2., -1.,  0.])
    """

    bits: int = 8
    column: int | None = None

    levels = 1
    draws = False

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, tuple(range(2, 9)))
        self._check_column()

    @property
    def _largest(self) -> int:
        """L, of the class's docstring."""
        return 2 ** (self.bits - 1) - 1

    @property
    def _base(self) -> int:
        return 2 * self._largest + 1

    @functools.cached_property
    def _loops(self) -> Digits:
        return Digits("linear", self._base, self._largest, self.column, zero=self._largest)

    def _code_size(self, n: int) -> int:
        return digits_size(n, self._base)

    def _encode(self, x: np.ndarray, length: int) -> tuple[list[np.ndarray], np.ndarray]:
        largest, digits, levels = self._largest, np.empty(x.size, np.uint8), []
        columns = zip(buckets.rows(x, length), buckets.rows(digits, length), strict=True)
        for part, own in columns:
            scale = np.abs(part).max(axis=1, keepdims=True) / part.dtype.type(largest)
            with np.errstate(over="ignore", invalid="ignore"):
                # What would overflow when decoded has to arrive as something that is not finite.
                scale[~np.isfinite(scale * largest)] = np.inf
                steps = np.rint(part / np.where(scale > 0, scale, 1))
                # Scales below the normal numbers are coarse: x / scale may be more than L.
                np.fmin(np.fmax(steps, -largest, out=steps), largest, out=steps)
                steps += largest
                own[:] = steps
            levels.append(scale)
        return levels, pack_digits(digits, self._base)

    def _decode(self, levels: np.ndarray, code: np.ndarray, n: int, length: int) -> np.ndarray:
        values = unpack_digits(code, n, self._base).astype(levels.dtype)
        values -= self._largest
        first = 0
        with np.errstate(over="ignore", invalid="ignore"):
            for part in buckets.rows(values, length):
                part *= levels[first : first + part.shape[0]]
                first += part.shape[0]
        return values

    def classes(self, d: int) -> Classes:
        """Return the constants for columns of d elements, which follow from |C(x) - x|^2 <= e^2
        |x|^2 with e^2 = q / (1 + q), q = (d - 1) / (2 L)^2.  The worst case is elements of half a
        scale beside the largest."""
        d = min(d, self._length(d))
        q = (d - 1) / (2 * self._largest) ** 2
        e = math.sqrt(q / (1 + q))
        return Classes((1 - e) ** 2, 1 + e, 1 - e, 1 + q)
