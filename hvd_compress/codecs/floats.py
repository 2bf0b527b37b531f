"""Numbers as they are, and eight bits with an exponent (Micikevicius et al., 2022)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress.codecs import runs
from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.runs import Scaled
from hvd_compress.codecs.selector import IDENTITY, Classes
from hvd_compress.config import checked, choice
from hvd_compress.kernels.codecs import Digits


@dataclasses.dataclass(frozen=True)
class plain(Codec, name="plain"):
    def size(self, n: int, dtype: np.dtype) -> int:
        return n * dtype.itemsize

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.frombuffer(x.astype(x.dtype.newbyteorder("<")).tobytes(), np.uint8)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        return np.frombuffer(code.tobytes(), dtype.newbyteorder("<")).astype(dtype)

    def classes(self, d: int) -> Classes:
        return IDENTITY


@dataclasses.dataclass(frozen=True)
class float8(Scaled, name="float8"):
    """Eight bits per element and a scale per bucket, to the nearest, ties to even.

    The scale puts the largest element of a bucket at the format's largest number, so nothing
    overflows.  Without it gradients would be lost below 2^-9 (E4M3) or 2^-16 (E5M2).

    Options:
        format: "e4m3" (three bits of significand, up to 448) or "e5m2" (two bits, up to 57344).
        bucket: elements that share a scale; ``None``: all of a tensor.

    Reference: Micikevicius et al., arXiv 2209.05433.

    >>> codec, x = float8(), np.array([448.0, 100.0, 1.0, 0.3])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 4, x.dtype).tolist()
    [448.0, 96.0, 1.0, 0.3125]
    """

    format: str = choice("e4m3", "e5m2")
    bucket: int | None = checked(runs.check_bucket, None)

    draws = False

    @functools.cached_property
    def _grid(self) -> Digits:
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

    def _scales(self, x: np.ndarray) -> np.ndarray:
        largest = super()._scales(x)
        scales = largest / x.dtype.type(self._grid.limit)
        # Of subnormal numbers the quotient may be 0, or too small for its inverse.
        return np.where(scales > 0, scales, np.where(largest > 0, largest, 0)).astype(x.dtype)

    def _rounded(
        self, x: np.ndarray, scales: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        grid = _positive(self.format).astype(x.dtype)
        size = np.fmin(np.abs(x) / np.where(scales > 0, scales, 1), grid[-1])
        high = np.clip(np.searchsorted(grid, size), 1, grid.size - 1)
        below, above = size - grid[high - 1], grid[high] - size
        code = high - ((below < above) | ((below == above) & (high % 2 == 1)))
        return code.astype(np.uint8) | (np.signbit(x) * np.uint8(128)).astype(np.uint8)


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
