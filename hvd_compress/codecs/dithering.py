"""The base of codecs that round ``x / norm`` to given levels at random."""

from __future__ import annotations

import abc

import numpy as np

from hvd_compress.codecs import buckets
from hvd_compress.codecs.base import Codec
from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.kernels.bitpacking import digits_size, pack_digits, unpack_digits


class Dithering(Codec):
    """A norm a bucket, and a digit an element: 2 ``levels`` + 1 values, of which zero is the one in
    the middle.  Subclasses have the options ``levels``, ``bucket`` and ``norm``."""

    levels: int
    bucket: int | None
    norm: str

    unbiased = True

    def _check(self, most: int) -> None:
        levels = self.levels
        if not is_whole(levels) or not 1 <= levels <= most:
            raise ConfigError(f"levels must be a number from 1 to {most}; got {levels!r}")
        buckets.check_bucket(self.bucket)
        buckets.check_norm(self.norm)

    @abc.abstractmethod
    def _digits(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """0 to 2 ``levels`` for numbers from -1 to 1, or a little beyond by rounding."""

    @abc.abstractmethod
    def _values(self, digits: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The numbers that digits stand for, in units of ``norm / self._unit``."""

    #: see ``_values``
    _unit = 1

    def unit(self, n: int) -> int:
        return self.bucket or 1

    def size(self, n: int, dtype: np.dtype) -> int:
        return buckets.count(n, self.bucket) * dtype.itemsize + digits_size(n, 2 * self.levels + 1)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        norms = buckets.norms(x, self.bucket, self.norm)
        safe = np.where((norms > 0) & np.isfinite(norms), norms, 1)
        digits = self._digits(x / buckets.per_element(safe, x.size, self.bucket), random)
        packed = pack_digits(digits, 2 * self.levels + 1)
        return np.concatenate([norms.astype(_little(x.dtype)).view(np.uint8), packed])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        split = buckets.count(n, self.bucket) * dtype.itemsize
        norms = code[:split].view(_little(dtype)).astype(dtype)
        values = self._values(unpack_digits(code[split:], n, 2 * self.levels + 1), dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            return values * buckets.per_element(norms / self._unit, n, self.bucket)


def _little(dtype: np.dtype) -> np.dtype:
    return np.dtype(dtype).newbyteorder("<")
