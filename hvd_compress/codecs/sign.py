"""One bit an element: signs, alone or with one scale."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress.codecs.base import Classes
from hvd_compress.codecs.compiled import Compiled
from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.kernels.bitpacking import full_bytes
from hvd_compress.kernels.codecs import Signs, drawn_zeros, total


class _Signs(Compiled):
    """The first bits of a byte are its lowest."""

    def size(self, n: int, dtype: np.dtype) -> int:
        return full_bytes(n)

    def _to_bytes(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.packbits(x >= 0, bitorder="little")

    def _from_bytes(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        bits = np.unpackbits(code, count=n, bitorder="little")
        values = bits.astype(dtype)
        values *= 2
        values -= 1
        return values


@dataclasses.dataclass(frozen=True)
class sign(_Signs, name="sign"):
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

    def _to_bytes(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.packbits(x > 0, bitorder="little") | drawn_zeros(x, random)


@dataclasses.dataclass(frozen=True)
class scaled_sign(_Signs, name="scaled_sign"):
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

    def _to_bytes(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if self.norm == "l1":
            scale = total(x, "magnitude") / max(x.size, 1)
        else:
            scale = np.sqrt(total(x, "square") / max(x.size, 1))
        with np.errstate(over="ignore"):
            head = np.array([scale], x.dtype.newbyteorder("<")).view(np.uint8)
        return np.concatenate([head, super()._to_bytes(x, random)])

    def _from_bytes(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        scale = code[: dtype.itemsize].view(dtype.newbyteorder("<"))[0].astype(dtype)
        return super()._from_bytes(code[dtype.itemsize :], n, dtype) * scale

    def classes(self, d: int) -> Classes:
        """Return the constants for ``norm="l1"``: |C(x)|^2 = <C(x), x> = |x|_1^2 / d, at least
        |x|^2 / d."""
        return Classes(1 / d, 1.0, 1 / d, float(d)) if self.norm == "l1" else super().classes(d)
