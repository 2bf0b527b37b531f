"""Powers of a base: natural compression and exponential dithering (Horvath et al., 2022;
Beznosikov et al., JMLR 2023)."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.dithering import Dithering
from hvd_compress.config import check_choice, is_number
from hvd_compress.errors import ConfigError
from hvd_compress.kernels.bitpacking import full_bytes
from hvd_compress.kernels.codecs import Digits, Natural
from hvd_compress.operators.classes import Classes


@dataclasses.dataclass(frozen=True)
class natural(Codec, name="natural"):
    """Sign and exponent: |x| between 2^e and 2^(e+1) becomes one of the two, and zero zero.

    Sent: 9 bits an element, the sign and eight bits of exponent as in float32; of float64 too, so
    values beyond the range of float32 do not survive there.  Subnormal numbers of float32 (below
    2^-126) become 0 or 2^-126.

    Options:
        biased: round to the nearer power instead of drawing one.  Less error, but a bias, which
            error feedback takes care of.

    Reference: Horvath et al., MSML 2022.

    >>> codec, x = natural(), np.array([4.0, 3.0, -0.5])
    >>> code = codec.encode(x, np.random.default_rng(0))
    >>> code.size, codec.decode(code, 3, x.dtype)
    (4, array([ 4. ,  2. , -0.5]))
    """

    biased: bool = False

    def __post_init__(self) -> None:
        check_choice("biased", self.biased, (True, False))

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


@dataclasses.dataclass(frozen=True)
class exponential_dithering(Dithering, name="exponential_dithering"):
    """``norm * sign(x) * l``, where l is one of the two levels beside |x| / norm among
    0, base^(1 - levels), ..., base^-1, 1, drawn so that the expectation is x.

    Sent: a norm a bucket, and log2(2 levels + 1) bits an element.

    Options:
        base: more than 1; 2 is natural dithering.
        levels: positive values there are, 1 to 127.
        bucket: elements that share a norm; ``None``: all of a tensor.
        norm: "l2", or "max", the largest magnitude.

    Reference: Horvath et al., MSML 2022, for base 2; Beznosikov et al., JMLR 2023.

    >>> codec, x = exponential_dithering(levels=3, norm="max"), np.array([4.0, 3.0, -1.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 3, x.dtype)
    array([ 4.,  2., -1.])
    """

    base: float = 2.0
    levels: int = 7
    bucket: int | None = 512
    norm: str = "l2"

    def __post_init__(self) -> None:
        base = self.base
        if not is_number(base) or not base > 1:
            raise ConfigError(f"base must be larger than 1; got {base!r}")
        self._check(127)
        if base ** (1 - self.levels) < 1e-30:
            raise ConfigError(
                f"base={base} and levels={self.levels}: the smallest level would be below 1e-30"
            )

    @property
    def _grid(self) -> np.ndarray:
        return np.concatenate([[0.0], float(self.base) ** np.arange(1 - self.levels, 1)])

    @functools.cached_property
    def _loops(self) -> Digits:
        grid = self._grid
        return Digits(
            "exponential",
            2 * self.levels + 1,
            self.levels,
            self.bucket,
            self.norm == "l2",
            grid=tuple(grid),
            table=np.concatenate([-grid[:0:-1], grid]),
        )

    def _digits(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        size, grid = np.fmax(np.abs(x), 0), self._grid.astype(x.dtype)
        low = np.clip(np.searchsorted(grid, size, side="right") - 1, 0, self.levels - 1)
        width = (grid[1:] - grid[:-1])[low]
        low += random.random(x.size, np.float32) * width < size - grid[low]
        return np.where(x < 0, self.levels - low, self.levels + low).astype(np.uint8)

    def _values(self, digits: np.ndarray, dtype: np.dtype) -> np.ndarray:
        grid = self._grid.astype(dtype)
        return np.concatenate([-grid[:0:-1], grid])[digits]

    def classes(self, d: int) -> Classes:
        """Return zeta = (b + 1/b + 2) / 4 + q min(1, q) with q = sqrt(d) b^(1-s) for buckets of d
        elements, which bounds the variance for either norm."""
        d = min(d, self.bucket or d)
        b = float(self.base)
        q = math.sqrt(d) * b ** (1 - self.levels)
        return Classes.unbiased((b + 1 / b + 2) / 4 + q * min(1.0, q))


def natural_dithering(
    levels: int = 7, bucket: int | None = 512, norm: str = "l2"
) -> exponential_dithering:
    """Return :class:`exponential_dithering` to base 2; ``levels``, ``bucket`` and ``norm`` are its
    options."""
    return exponential_dithering(2.0, levels, bucket, norm)
