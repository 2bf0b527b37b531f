"""Eight bits with an exponent: the formats E4M3 and E5M2 (Micikevicius et al., 2022)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress.codecs import buckets
from hvd_compress.codecs.base import Codec
from hvd_compress.config import check_choice
from hvd_compress.kernels.codecs import Digits


@dataclasses.dataclass(frozen=True)
class float8(Codec, name="float8"):
    """Eight bits an element and a scale a bucket, to the nearest, ties to even.

    The scale puts the largest element of a bucket at the format's largest number, so nothing
    overflows; without it gradients would be lost below 2^-9 (E4M3) or 2^-16 (E5M2).

    Options:
        format: "e4m3" (three bits of significand, up to 448) or "e5m2" (two bits, up to 57344).
        bucket: elements that share a scale; ``None``: all of a tensor.

    Reference: Micikevicius et al., arXiv 2209.05433.

    >>> codec, x = float8(), np.array([448.0, 100.0, 1.0, 0.3])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 4, x.dtype).tolist()
    [448.0, 96.0, 1.0, 0.3125]
    """

    format: str = "e4m3"
    bucket: int | None = None

    draws = False

    def __post_init__(self) -> None:
        check_choice("format", self.format, ("e4m3", "e5m2"))
        buckets.check_bucket(self.bucket)

    def unit(self, n: int) -> int:
        return self.bucket or 1

    def size(self, n: int, dtype: np.dtype) -> int:
        return buckets.count(n, self.bucket) * dtype.itemsize + n

    @functools.cached_property
    def _loops(self) -> Digits:
        exponent, mantissa = int(self.format[1]), int(self.format[3])
        return Digits(
            "float8",
            256,
            length=self.bucket,
            limit=float(_positive(self.format)[-1]),
            mantissa=mantissa,
            bias=2 ** (exponent - 1) - 1,
            table=_numbers(self.format),
        )

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        grid = _positive(self.format).astype(x.dtype)
        largest = buckets.norms(x, self.bucket, "max")
        scales = largest / grid[-1]
        # Of subnormal numbers the quotient may be 0, or too small for its inverse.
        scales = np.where(scales > 0, scales, np.where(largest > 0, largest, 0)).astype(x.dtype)
        safe = np.where(scales > 0, scales, 1)
        size = np.fmin(np.abs(x) / buckets.per_element(safe, x.size, self.bucket), grid[-1])
        high = np.clip(np.searchsorted(grid, size), 1, grid.size - 1)
        below, above = size - grid[high - 1], grid[high] - size
        code = high - ((below < above) | ((below == above) & (high % 2 == 1)))
        code = code.astype(np.uint8) | (np.signbit(x) * np.uint8(128)).astype(np.uint8)
        return np.concatenate([scales.astype(x.dtype.newbyteorder("<")).view(np.uint8), code])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        split = buckets.count(n, self.bucket) * dtype.itemsize
        scales = code[:split].view(dtype.newbyteorder("<")).astype(dtype)
        table = _numbers(self.format).astype(dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            return table[code[split:]] * buckets.per_element(scales, n, self.bucket)


@functools.cache
def _numbers(format: str) -> np.ndarray:
    """The number that each of the 256 codes stands for."""
    grid = np.full(128, np.nan)
    known = _positive(format)
    grid[: known.size] = known
    return np.concatenate([grid, -grid])


@functools.cache
def _positive(format: str) -> np.ndarray:
    """The finite numbers from zero on, at the place of their code."""
    exponent, mantissa = int(format[1]), int(format[3])
    bias = 2 ** (exponent - 1) - 1
    codes = np.arange(128)
    e, m = codes >> mantissa, (codes & (2**mantissa - 1)) / 2**mantissa
    values = np.where(e == 0, m * 2.0 ** (1 - bias), (1 + m) * 2.0 ** (e - bias))
    # E4M3 has one code for NaN and none for Inf; E5M2 keeps the largest exponent for both.
    return values[:127] if format == "e4m3" else values[: 31 << mantissa]
