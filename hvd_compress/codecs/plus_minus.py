"""One bit an element: the sign of a number that all ranks know."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.codecs.sign import packed, plus_minus_one
from hvd_compress.kernels.bitpacking import full_bytes
from hvd_compress.kernels.codecs import Signs
from hvd_compress.operators.threshold import check_tau


@dataclasses.dataclass(frozen=True)
class plus_minus(Codec, name="plus_minus"):
    """``tau`` or ``-tau``; zeros count as positive.  ``tau`` itself is not sent, since the
    ranks' options are the same.

    Options:
        tau: a positive number, in units of the gradient.

    >>> codec, x = plus_minus(tau=0.5), np.array([8.0, -5.0, 2.0])
    >>> code = codec.encode(x, np.random.default_rng(0))
    >>> code.size, codec.decode(code, 3, x.dtype)
    (1, array([ 0.5, -0.5,  0.5]))
    """

    tau: float

    homogeneous = False

    def __post_init__(self) -> None:
        check_tau(self.tau)

    @functools.cached_property
    def _loops(self) -> Signs:
        return Signs(float(self.tau))

    def size(self, n: int, dtype: np.dtype) -> int:
        return full_bytes(n)

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return packed(x >= 0)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        return plus_minus_one(code, n, dtype) * dtype.type(self.tau)
