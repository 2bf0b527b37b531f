"""One bit an element: signs, alone or with one scale."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress.codecs.base import Classes, Codec
from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.kernels.bitpacking import full_bytes
from hvd_compress.kernels.codecs import Signs, drawn_zeros, total


def packed(bits: np.ndarray) -> np.ndarray:
    """Return bits in bytes, the first of which are their lowest."""
    return np.packbits(bits, bitorder="little")


def plus_minus_one(code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
    """Return 1 for each of ``n`` bits that is set, and -1 for the others."""
    values = np.unpackbits(code, count=n, bitorder="little").astype(dtype)
    values *= 2
    values -= 1
    return values


@dataclasses.dataclass(frozen=True)
class sign(Codec, name="sign"):
    """+1 or -1; of zeros one of the two at random, so that ranks with zero gradients do not all
    vote for the same sign.  Magnitudes are lost, so it is in none of the classes of operators.

    Reference: Bernstein et al., signSGD, ICML 2018.

    >>> codec, x = sign(), np.array([8.0, -5.0, 2.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 3, x.dtype)
    array([ 1., -1.,  1.])
    """

    homogeneous = False

    _loops = Signs(1.0, draws_zeros=True)

    def check_feedback(self, d: int) -> None:
        raise ConfigError(
            "sign() says nothing about magnitudes, so error feedback would wait for ever larger "
            "ones: scaled_sign() has them"
        )

    def size(self, n: int, dtype: np.dtype) -> int:
        return full_bytes(n)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return packed(x > 0) | drawn_zeros(x, random)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        return plus_minus_one(code, n, dtype)


@dataclasses.dataclass(frozen=True)
class scaled_sign(Codec, name="scaled_sign"):
    """``scale * sign(x)``; zeros count as positive.

    Options:
        norm: "l1", scale = mean |x|, which has the least error (Karimireddy et al., ICML 2019); or
            "l2", scale = |x|_2 / sqrt(d), of 1-bit Adam: it keeps the norm, and its error can be
            larger than x itself.

    >>> codec, x = scaled_sign(), np.array([8.0, -5.0, 2.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 3, x.dtype)
    array([ 5., -5.,  5.])
    """

    norm: str = "l1"

    draws = False

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, ("l1", "l2"))

    @functools.cached_property
    def _loops(self) -> Signs:
        return Signs(self.norm)

    def size(self, n: int, dtype: np.dtype) -> int:
        return dtype.itemsize + full_bytes(n)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if self.norm == "l1":
            scale = total(x, "magnitude") / max(x.size, 1)
        else:
            scale = np.sqrt(total(x, "square") / max(x.size, 1))
        with np.errstate(over="ignore"):
            head = np.array([scale], x.dtype.newbyteorder("<")).view(np.uint8)
        return np.concatenate([head, packed(x >= 0)])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        scale = code[: dtype.itemsize].view(dtype.newbyteorder("<"))[0].astype(dtype)
        return plus_minus_one(code[dtype.itemsize :], n, dtype) * scale

    def classes(self, d: int) -> Classes:
        """Return the constants for ``norm="l1"``: |C(x)|^2 = <C(x), x> = |x|_1^2 / d, at least
        |x|^2 / d."""
        return Classes(1 / d, 1.0, 1 / d, float(d)) if self.norm == "l1" else super().classes(d)
