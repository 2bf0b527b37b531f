"""Levels of ``x / norm``, drawn so that the expectation is x.

References: QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic, 2017); exponential and natural dithering
(Horvath et al., 2022).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from hvd_compress.codecs import runs
from hvd_compress.codecs.runs import Scaled
from hvd_compress.codecs.selector import Classes
from hvd_compress.config import Check, checked, choice, numbers
from hvd_compress.errors import ConfigError
from hvd_compress.kernels.codecs import Digits


def levels_up_to(most: int) -> Check:
    return numbers(f"a number from 1 to {most}", lambda n: 1 <= n <= most, whole=True)


class Dithering(Scaled):
    """A norm a bucket, and 2 ``levels`` + 1 values, of which zero is the one in the middle."""

    levels: int
    bucket: int | None
    norm: str

    unbiased = True

    def _quotients(self, x: np.ndarray, norms: np.ndarray) -> np.ndarray:
        return x / np.where((norms > 0) & np.isfinite(norms), norms, 1)


@dataclasses.dataclass(frozen=True)
class uniform_dithering(Dithering, name="uniform_dithering"):
    """``norm * sign(x) * l / levels``, where l is one of the two integers beside
    ``levels * |x| / norm``, drawn so that the expectation is x.

    Sent: a norm per bucket, and log2(2 levels + 1) bits per element.  A bucket of zeros decodes to
    zeros.

    Options:
        levels: positive values there are, s in the paper.
        bucket: elements that share a norm; ``None``: all of a tensor.
        norm: "l2", as in the paper's analysis, or "max", which has less variance.

    Reference: Alistarh et al., NeurIPS 2017.

    >>> codec, x = uniform_dithering(levels=4, norm="max"), np.array([4.0, -1.0, 2.5])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 3, x.dtype)
    array([ 4., -1.,  2.])
    """

    levels: int = checked(levels_up_to(2**15 - 1), 7)
    bucket: int | None = checked(runs.check_bucket, 512)
    norm: str = choice(*runs.NORMS)

    @functools.cached_property
    def _grid(self) -> Digits:
        n, l2 = self.levels, self.norm == "l2"
        return Digits("uniform", 2 * n + 1, n, self.bucket, l2, zero=n, unit=n)

    def _rounded(
        self, x: np.ndarray, scales: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        n, quotients = self.levels, self._quotients(x, scales)
        with np.errstate(over="ignore"):
            steps = np.fmin(np.fmax(quotients * n, -n - 1), n + 1)
        low = np.floor(steps)
        low += random.random(x.size, np.float32) < steps - low
        return (np.clip(low, -n, n) + n).astype(np.uint16)

    def classes(self, d: int) -> Classes:
        """Return zeta = 1 + min(d / (4 s^2), sqrt(d) / s) for buckets of d elements, either norm.

        The variance is (norm / s)^2 times a sum of p (1 - p), of which each is at most 1/4; the
        paper has 1 there.
        """
        d = min(d, self.bucket or d)
        return Classes.unbiased(1 + min(d / (4 * self.levels**2), d**0.5 / self.levels))


@dataclasses.dataclass(frozen=True)
class exponential_dithering(Dithering, name="exponential_dithering"):
    """``norm * sign(x) * l``, where l is one of the two levels beside |x| / norm among
    0, base^(1 - levels), ..., base^-1, 1, drawn so that the expectation is x.

    Options:
        base: more than 1; 2 is natural dithering.
        levels: positive values there are, 1 to 127.
        bucket, norm: see :class:`uniform_dithering`.

    Reference: Horvath et al., MSML 2022, for base 2; Beznosikov et al., JMLR 2023.

    >>> codec, x = exponential_dithering(levels=3, norm="max"), np.array([4.0, 3.0, -1.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 3, x.dtype)
    array([ 4.,  2., -1.])
    """

    base: float = checked(numbers("larger than 1", lambda base: base > 1), 2.0)
    levels: int = checked(levels_up_to(127), 7)
    bucket: int | None = checked(runs.check_bucket, 512)
    norm: str = choice(*runs.NORMS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base ** (1 - self.levels) < 1e-30:
            raise ConfigError(
                f"base={self.base} and levels={self.levels}: the smallest level would be below "
                "1e-30"
            )

    @functools.cached_property
    def _grid(self) -> Digits:
        n, l2 = self.levels, self.norm == "l2"
        grid = np.concatenate([[0.0], float(self.base) ** np.arange(1 - n, 1)])
        table = np.concatenate([-grid[:0:-1], grid])
        kind = "exponential"
        return Digits(kind, 2 * n + 1, n, self.bucket, l2, grid=tuple(grid), table=table)

    def _rounded(
        self, x: np.ndarray, scales: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        size, grid = (
            np.fmax(np.abs(self._quotients(x, scales)), 0),
            np.array(self._grid.grid, x.dtype),
        )
        low = np.clip(np.searchsorted(grid, size, side="right") - 1, 0, self.levels - 1)
        width = (grid[1:] - grid[:-1])[low]
        low += random.random(x.size, np.float32) * width < size - grid[low]
        return np.where(x < 0, self.levels - low, self.levels + low).astype(np.uint8)

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
