"""Powers of two: natural compression (Horvath et al., 2022)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.config import check_choice
from hvd_compress.kernels.bitpacking import full_bytes
from hvd_compress.kernels.codecs import Natural
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
