"""Rounding to powers of two (natural compression, Horvath et al., 2022), or to levels of one's own
choice (Beznosikov et al., JMLR 2023)."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.selector import Classes
from hvd_compress.config import (
    as_tuple,
    checked,
    choice,
    converted,
    is_number,
    numbers,
)
from hvd_compress.errors import ConfigError
from hvd_compress.kernels.bitpacking import digits_size, full_bytes, pack_digits, unpack_digits
from hvd_compress.kernels.codecs import Natural


@dataclasses.dataclass(frozen=True)
class natural(Codec, name="natural"):
    """Sign and exponent: |x| between 2^e and 2^(e+1) becomes one of the two, and zero zero.

    Sent: 9 bits per element, sign and exponent as in float32; of float64 too, so values beyond the
    range of float32 do not survive.  Subnormal numbers of float32 become 0 or 2^-126.

    Options:
        biased: round to the nearer power instead of drawing one, for error feedback.

    Reference: Horvath et al., MSML 2022.

    >>> codec, x = natural(), np.array([4.0, 3.0, -0.5])
    >>> code = codec.encode(x, np.random.default_rng(0))
    >>> code.size, codec.decode(code, 3, x.dtype)
    (4, array([ 4. ,  2. , -0.5]))
    """

    biased: bool = choice(True, False, default=False)

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return not self.biased

    def size(self, n: int, dtype: np.dtype) -> int:
        return n + full_bytes(n)

    @functools.cached_property
    def _loops(self) -> Natural:
        return Natural(self.biased)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        size = np.abs(x)
        mantissa, exponent = np.frexp(size)  # size = mantissa * 2^exponent, 1/2 <= mantissa < 1
        code = exponent + 126  # of the power below, as float32 has it
        with np.errstate(over="ignore"):  # below 2^-126 there is only zero
            part = np.where(code < 1, np.ldexp(size, 126), 2 * mantissa - 1)
        limit = 0.5 if self.biased else random.random(x.size, np.float32)
        code = np.minimum(np.maximum(code, 0) + (limit < part), 255) * (size > 0)
        code = np.where(np.isfinite(size), code, 255)
        signs = np.packbits(x < 0, bitorder="little")
        return np.concatenate([code.astype(np.uint8), signs])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        exponents, signs = code[:n], np.unpackbits(code[n:], count=n, bitorder="little")
        # As the bits of a float32: 255 is Inf, what overflowed.
        bits = exponents.astype(np.uint32) << np.uint32(23) | signs.astype(np.uint32) << np.uint32(
            31
        )
        return bits.view(np.float32).astype(dtype)

    def classes(self, d: int) -> Classes:
        return Classes(4 / 9, 4 / 3, 2 / 3, 9 / 8) if self.biased else Classes.unbiased(9 / 8)


#: the range of normal float32
_LEAST, _MOST = 2.0**-126, float(np.finfo(np.float32).max)


def _as_tuple(levels: Any) -> Any:
    if levels is None:
        return None
    found = as_tuple("levels")(levels)
    if not all(map(is_number, found)):
        raise ConfigError(f"levels must be numbers, for instance (0.25, 0.5, 1.0); got {levels!r}")
    return found


@dataclasses.dataclass(frozen=True)
class rounding(Codec, name="rounding"):
    """``sign(x) * a``, where a is one of the two levels beside |x|; zero stays zero.

    Unbiased, it draws one of the two so that the expectation is x; biased, it takes the nearer one
    (of two equally near, the lower).  Zero is the level below the lowest.  Beyond the highest, a
    biased one sends the highest; an unbiased one, which has nothing true to say there, sends Inf.

    Sent: the number of the level and the sign, log2(2 m + 1) bits per element for m levels.

    Options:
        base: levels are its powers in float32, 254 of base 2; from 1.0055 to 1e9.
        levels: 2 to 32766 positive numbers, ascending, instead of powers.
        biased: see above.

    Reference: Beznosikov et al., JMLR 2023.

    >>> codec, x = rounding(levels=(1.0, 2.0, 5.0), biased=True), np.array([4.0, -1.2, 9.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 3, x.dtype)
    array([ 5., -1.,  5.])
    """

    base: float = checked(numbers("from 1.0055 to 1e9", lambda base: 1.0055 <= base < 1e9), 2.0)
    levels: tuple[float, ...] | None = dataclasses.field(
        default=None, metadata=converted(_as_tuple)
    )
    biased: bool = choice(True, False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels is None:
            return
        levels = np.asarray(self.levels, np.float32)
        if not 2 <= levels.size <= 32766 or not (np.diff(levels) > 0).all():
            raise ConfigError("levels must be 2 to 32766 ascending numbers, distinct in float32")
        if not levels[0] >= _LEAST or not np.isfinite(levels).all():
            raise ConfigError("levels must be positive, and within the normal range of float32")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return not self.biased

    @property
    def homogeneous(self) -> bool:
        """True for powers of 2 alone: twice a level is a level."""
        return self.levels is None and self.base == 2

    @functools.cached_property
    def _ladder(self) -> np.ndarray:
        """Zero, the levels and, for an unbiased codec, Inf; all as float32."""
        levels = self.levels
        if levels is None:
            lowest = math.ceil(math.log(_LEAST, self.base) - 1e-9)
            highest = math.floor(math.log(_MOST, self.base) + 1e-9)
            levels = tuple(float(self.base) ** k for k in range(lowest, highest + 1))
            levels = tuple(level for level in levels if _LEAST <= level <= _MOST)
        end = () if self.biased else (np.inf,)
        return np.array([0.0, *levels, *end], np.float32)

    @property
    def _digits(self) -> int:
        return 2 * self._ladder.size - 1

    def size(self, n: int, dtype: np.dtype) -> int:
        return digits_size(n, self._digits)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        ladder = self._ladder.astype(np.float64)
        top = ladder.size - 1
        size = np.abs(x).astype(np.float64)
        low = np.minimum(np.searchsorted(ladder, size, side="right") - 1, top - 1)
        below, above = ladder[low], ladder[low + 1]
        if self.biased:
            up = size - below > above - size
        else:  # what is beyond the last level is infinitely far from Inf, but not worth less
            with np.errstate(invalid="ignore"):
                part = np.where(np.isinf(above), size > below, (size - below) / (above - below))
            up = random.random(x.size) < part
        digits = np.where(x < 0, top - low - up, top + low + up)
        return pack_digits(digits.astype(np.uint16), self._digits)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        ladder = self._ladder
        table = np.concatenate([-ladder[:0:-1], ladder]).astype(dtype)
        return table[unpack_digits(code, n, self._digits)]

    def classes(self, d: int) -> Classes:
        """Return the constants by the largest quotient r of neighbouring levels, of powers the
        base.

        Unbiased: zeta = (r + 1/r + 2) / 4.  Biased: between a and r a, alpha = (2 / (1 + r))^2,
        beta = 2 r / (1 + r), gamma = 2 / (1 + r), delta = (1 + r)^2 / (4 r).
        """
        r = float(self.base)
        if self.levels is not None:
            r = max(high / low for low, high in itertools.pairwise(self.levels))
        if not self.biased:
            return Classes.unbiased((r + 1 / r + 2) / 4)
        return Classes(4 / (1 + r) ** 2, 2 * r / (1 + r), 2 / (1 + r), (1 + r) ** 2 / (4 * r))
