"""One bit per element: signs, alone, with one scale, or of a number that all ranks know."""

from __future__ import annotations

import abc
import dataclasses
import functools

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.selector import Classes
from hvd_compress.codecs.threshold import check_tau
from hvd_compress.config import checked, choice
from hvd_compress.errors import ConfigError
from hvd_compress.kernels.bitpacking import full_bytes
from hvd_compress.kernels.codecs import Signs, drawn_zeros, total


class Bits(Codec):
    """One bit per element, after the scale if that is sent."""

    is_coarse = True

    @property
    @abc.abstractmethod
    def _loops(self) -> Signs: ...

    def size(self, n: int, dtype: np.dtype) -> int:
        return isinstance(self._loops.scale, str) * dtype.itemsize + full_bytes(n)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        if self._loops.draws_zeros:
            return _packed(x > 0) | drawn_zeros(x, random)
        if not isinstance(self._loops.scale, str):
            return _packed(x >= 0)
        if self._loops.scale == "l1":
            scale = total(x, "magnitude") / max(x.size, 1)
        else:
            scale = np.sqrt(total(x, "square") / max(x.size, 1))
        with np.errstate(over="ignore"):
            head = np.array([scale], x.dtype.newbyteorder("<")).view(np.uint8)
        return np.concatenate([head, _packed(x >= 0)])

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        scale = self._loops.scale
        if isinstance(scale, str):
            head, code = code[: dtype.itemsize], code[dtype.itemsize :]
            scale = head.view(dtype.newbyteorder("<"))[0]
        values = np.unpackbits(code, count=n, bitorder="little").astype(dtype)
        values *= 2
        values -= 1
        return values * dtype.type(scale)


def _packed(bits: np.ndarray) -> np.ndarray:
    return np.packbits(bits, bitorder="little")


@dataclasses.dataclass(frozen=True)
class sign(Bits, name="sign"):
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


@dataclasses.dataclass(frozen=True)
class scaled_sign(Bits, name="scaled_sign"):
    """``scale * sign(x)``; zeros count as positive.

    Options:
        norm: "l1", scale = mean |x|, which has the least error (Karimireddy et al., ICML 2019).
            "l2", scale = |x|_2 / sqrt(d), is that of 1-bit Adam: it keeps the norm, and its error
            can be larger than x itself.

    >>> codec, x = scaled_sign(), np.array([8.0, -5.0, 2.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 3, x.dtype)
    array([ 5., -5.,  5.])
    """

    norm: str = choice("l1", "l2")

    draws = False

    @functools.cached_property
    def _loops(self) -> Signs:
        return Signs(self.norm)

    def classes(self, d: int) -> Classes:
        """Return the constants for ``norm="l1"``: |C(x)|^2 = <C(x), x> = |x|_1^2 / d, at least
        |x|^2 / d."""
        return Classes(1 / d, 1.0, 1 / d, float(d)) if self.norm == "l1" else super().classes(d)


@dataclasses.dataclass(frozen=True)
class plus_minus(Bits, name="plus_minus"):
    """``tau`` or ``-tau``; zeros count as positive.  ``tau`` itself is not sent, since the
    ranks' options are the same.

    Options:
        tau: a positive number, in units of the gradient.

    >>> codec, x = plus_minus(tau=0.5), np.array([8.0, -5.0, 2.0])
    >>> code = codec.encode(x, np.random.default_rng(0))
    >>> code.size, codec.decode(code, 3, x.dtype)
    (1, array([ 0.5, -0.5,  0.5]))
    """

    tau: float = checked(check_tau)

    homogeneous = False

    @functools.cached_property
    def _loops(self) -> Signs:
        return Signs(float(self.tau))
