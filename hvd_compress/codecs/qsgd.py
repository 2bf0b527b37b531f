"""QSGD: uniform levels, stochastic rounding (Alistarh, Grubic, Li, Tomioka, Vojnovic; 2017)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress.codecs.dithering import Dithering
from hvd_compress.kernels.codecs import Digits
from hvd_compress.operators.classes import Classes


@dataclasses.dataclass(frozen=True)
class uniform_dithering(Dithering, name="uniform_dithering"):
    """``norm * sign(x) * l / levels``, where l is one of the two integers beside
    ``levels * |x| / norm``, drawn so that the expectation is x.

    Sent: a norm a bucket, and log2(2 levels + 1) bits an element.  A bucket of zeros decodes to
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

    levels: int = 7
    bucket: int | None = 512
    norm: str = "l2"

    def __post_init__(self) -> None:
        self._check(2**15 - 1)

    @property
    def _unit(self) -> int:  # type: ignore[override]
        return self.levels

    @functools.cached_property
    def _loops(self) -> Digits | None:
        base, l2 = 2 * self.levels + 1, self.norm == "l2"
        if base > 256:
            return None
        n = self.levels
        return Digits("uniform", base, n, self.bucket, l2, zero=n, unit=n)

    def _digits(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        with np.errstate(over="ignore"):
            steps = np.fmin(np.fmax(x * self.levels, -self.levels - 1), self.levels + 1)
        low = np.floor(steps)
        low += random.random(x.size, np.float32) < steps - low
        return (np.clip(low, -self.levels, self.levels) + self.levels).astype(np.uint16)

    def _values(self, digits: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return digits.astype(dtype) - self.levels

    def classes(self, d: int) -> Classes:
        """Return zeta = 1 + min(d / (4 s^2), sqrt(d) / s) for buckets of d elements, either norm.

        The variance is (norm / s)^2 times a sum of p (1 - p), of which each is at most 1/4; the
        paper has 1 there.
        """
        d = min(d, self.bucket or d)
        return Classes.unbiased(1 + min(d / (4 * self.levels**2), d**0.5 / self.levels))
