"""An unbiased codec, scaled so that error feedback can follow it."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.selector import Classes
from hvd_compress.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class contraction(Codec, name="contraction"):
    """The values that ``codec`` decodes to, divided by its zeta: of class U(zeta) becomes class
    B3(zeta).  The same bytes are sent.

    Options:
        codec: an unbiased codec with known constants, such as ``natural()``.

    Reference: Beznosikov et al., JMLR 2023.

    >>> codec, x = contraction(natural()), np.array([4.0, -1.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 2, x.dtype).round(3)
    array([ 3.556, -0.889])
    >>> codec.classes(2).delta
    1.125
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec) or not self.codec.unbiased:
            raise ConfigError(f"contraction takes an unbiased codec; got {self.codec!r}")
        self.codec.classes(1)  # or there is nothing to scale by

    def for_shape(self, shape: tuple[int, ...]) -> Codec:
        return contraction(self.codec.for_shape(shape))

    def unit(self, n: int) -> int:
        return self.codec.unit(n)

    def size(self, n: int, dtype: np.dtype) -> int:
        return self.codec.size(n, dtype)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return self.codec.encode(x, random)

    def encode_to(self, x: np.ndarray, random: np.random.Generator, out: np.ndarray) -> None:
        self.codec.encode_to(x, random, out)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        values = np.empty(n, dtype)
        self.codec.decode_to(code, values)
        values /= self.codec.classes(n).zeta if n else 1
        return values

    def classes(self, d: int) -> Classes:
        inner = self.codec.classes(d)
        zeta = inner.zeta or 1.0
        return Classes(inner.alpha / zeta**2, 1.0, 1 / zeta, zeta)
