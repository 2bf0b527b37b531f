"""TernGrad: three values an element (Wen, Xu, Yan, Wu, Wang, Chen, Li; NeurIPS 2017)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from hvd_compress.codecs.runs import Scaled
from hvd_compress.codecs.selector import Classes
from hvd_compress.config import checked, numbers
from hvd_compress.kernels.codecs import Digits, Loops, total


@dataclasses.dataclass(frozen=True)
class ternary(Scaled, name="ternary"):
    """``m * sign(x)`` with probability |x| / m, else 0, where m = max |x| of the tensor.

    Sent: m, and 1.6 bits per element (log2 3 is 1.585).

    Options:
        clip: the number of standard deviations at which elements are clipped first; ``None``: none.
            A small m has a small variance, at the price of a bias.  The paper has 2.5.

    Reference: Wen et al., NeurIPS 2017.

    >>> codec, x = ternary(), np.array([8.0, -5.0, 2.0, 0.0])
    >>> codec.decode(codec.encode(x, np.random.default_rng(0)), 4, x.dtype)
    array([8., 0., 0., 0.])
    """

    clip: float | None = checked(
        numbers("in standard deviations, or None", lambda clip: clip > 0, optional=True), None
    )

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.clip is None

    @property
    def _grid(self) -> Digits:
        return Ternary.digits

    @functools.cached_property
    def _loops(self) -> Ternary:
        return Ternary(self)

    def _limit(self, x: np.ndarray) -> float:
        """The limit of magnitudes.  If all elements are alike nothing stands out that could be
        clipped."""
        if self.clip is None or not x.size:
            return math.inf
        with np.errstate(invalid="ignore"):
            mean = total(x, "plain") / x.size
            limit = self.clip * math.sqrt(total(x, "square", mean) / x.size)
        return limit if limit > 0 else math.inf

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        limit = self._limit(x)
        return super().encode(np.clip(x, -limit, limit), random)

    def _heads(self, n: int) -> int:
        return 1

    def _scales(self, x: np.ndarray) -> np.ndarray:
        return np.abs(x).max(initial=0, keepdims=True)

    def _rounded(
        self, x: np.ndarray, scales: np.ndarray, random: np.random.Generator
    ) -> np.ndarray:
        chosen = random.random(x.size, np.float32) * scales < np.abs(x)
        return (np.where(chosen, np.sign(x), 0) + 1).astype(np.uint8)

    def check_feedback(self, d: int) -> None:
        # Clipping makes m smaller, but what is drawn may be as far off as before.
        super(ternary, dataclasses.replace(self, clip=None)).check_feedback(d)

    def classes(self, d: int) -> Classes:
        """Return the constants without clipping: E|C(x)|^2 = m |x|_1, at most (1 + sqrt(d)) / 2
        times |x|^2."""
        return Classes.unbiased((1 + d**0.5) / 2) if self.clip is None else super().classes(d)


@dataclasses.dataclass(frozen=True)
class Ternary(Loops):
    """The codec ``ternary``; m is sent even if there are no elements."""

    codec: ternary

    #: without clipping
    digits = Digits("ternary", 3, zero=1)
    draws = True

    @property
    def _code(self) -> Any:
        return self.digits._code

    @property
    def feeds(self) -> bool:  # type: ignore[override]
        return self.codec.clip is None

    def encode(self, x: np.ndarray, random: np.random.Generator, out: np.ndarray) -> None:
        if x.size:
            limit = self.codec._limit(x)
            dataclasses.replace(self.digits, limit=limit).encode(x, random, out)
        else:
            out[:] = 0

    def decode(self, code: np.ndarray, out: np.ndarray, add: bool, sign: int = 1) -> None:
        if out.size:
            self.digits.decode(code, out, add, sign)
