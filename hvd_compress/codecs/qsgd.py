"""QSGD: uniform levels, stochastic rounding (Alistarh, Grubic, Li, Tomioka, Vojnovic; 2017)."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.codecs import buckets
from hvd_compress.codecs.base import Classes, Codec
from hvd_compress.errors import ConfigError
from hvd_compress.wire.fields import digits_size, pack_digits, unpack_digits


@dataclasses.dataclass(frozen=True)
class uniform_dithering(Codec, name="uniform_dithering"):
    """``norm * sign(x) * l / levels``, where l is one of the two integers beside
    ``levels * |x| / norm``, drawn so that the expectation is x.

    Sent: a norm a bucket, and log2(2 levels + 1) bits an element.  A bucket of zeros decodes to
    zeros.

    Options:
        levels: positive values there are, s in the paper.
        bucket: elements that share a norm; ``None``: all of a tensor.
        norm: "l2", as in the paper's analysis, or "max", which has less variance.
    """

    levels: int = 7
    bucket: int | None = 512
    norm: str = "l2"

    unbiased = True

    def __post_init__(self) -> None:
        levels = self.levels
        if isinstance(levels, bool) or not isinstance(levels, int) or not 1 <= levels < 2**15:
            raise ConfigError(f"levels must be a number from 1 to 32767; got {levels!r}")
        buckets.check_bucket(self.bucket)
        buckets.check_norm(self.norm)

    def unit(self, n: int) -> int:
        return self.bucket or 1

    def size(self, n: int, dtype: np.dtype) -> int:
        return buckets.count(n, self.bucket) * dtype.itemsize + digits_size(n, 2 * self.levels + 1)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        norms = buckets.norms(x, self.bucket, self.norm)
        safe = np.where((norms > 0) & np.isfinite(norms), norms, 1)
        steps = x / buckets.per_element(safe, x.size, self.bucket)
        steps *= self.levels
        low = np.floor(steps)
        low += random.random(x.size, np.float32) < steps - low
        # Rounding may have put the largest element a little beyond its norm.
        codes = np.clip(low, -self.levels, self.levels) + self.levels
        packed = pack_digits(codes.astype(np.uint16), 2 * self.levels + 1)
        return np.concatenate([norms.astype(_little(x.dtype)).view(np.uint8), packed])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        split = buckets.count(n, self.bucket) * dtype.itemsize
        norms = code[:split].view(_little(dtype)).astype(dtype)
        digits = unpack_digits(code[split:], n, 2 * self.levels + 1)
        values = digits.astype(dtype) - self.levels
        with np.errstate(invalid="ignore", over="ignore"):
            return values * buckets.per_element(norms / self.levels, n, self.bucket)

    def classes(self, d: int) -> Classes:
        """zeta = 1 + min(d / (4 s^2), sqrt(d) / s) for buckets of d elements, for either norm.

        The variance is (norm / s)^2 times a sum of p (1 - p), of which each is at most 1/4; the
        paper has 1 there.
        """
        d = min(d, self.bucket or d)
        return Classes.unbiased(1 + min(d / (4 * self.levels**2), d**0.5 / self.levels))


def _little(dtype: np.dtype) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")
