"""The contract of a codec: how the values of a flat array become bytes, and what they mean."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np

from hvd_compress.codecs.selector import Classes
from hvd_compress.config import Configurable
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.kernels import is_compiled
from hvd_compress.kernels.codecs import Loops, all_finite, as_loops_take


class Bound(NamedTuple):
    """:meth:`Codec.feed` and :meth:`Codec.mean`, for float32 arrays."""

    feed: Callable[..., tuple[bool, bool]]
    mean: Callable[..., bool]


class Codec(Configurable, abc.ABC, kind="block"):
    """How an array of n numbers becomes bytes.

    Codecs work on NumPy arrays, flat, float32 or float64, in host memory: one implementation gives
    the same bits under every framework.  ``encode`` and ``decode`` define a code in NumPy.  If
    there are compiled loops, the other methods do the same in one pass, without arrays in between.
    A device array is copied once each way; whole buckets have loops for a GPU
    (:mod:`hvd_compress.fused.coded_plan`).  All of them have the same bits.

    Subclasses are frozen dataclasses: options are fields.

    >>> codec, x = linear(bits=8), np.linspace(-1, 1, 512, dtype=np.float32)
    >>> code = codec.encode(x, np.random.default_rng(0))
    >>> code.dtype, code.size, codec.size(512, x.dtype), codec.bits_per_element(512)
    (dtype('uint8'), 516, 516, 8.0625)
    >>> round(float(abs(codec.decode(code, 512, x.dtype) - x).max()), 4)  # half a level: 1/254
    0.0039
    """

    #: ``encode`` draws random numbers, and E[decode(encode(x))] = x
    unbiased: ClassVar[bool] = False
    #: ``encode`` may draw random numbers
    draws: ClassVar[bool] = True
    #: ``encode`` takes NaN and Inf, too, and tells receivers where they are
    takes_non_finite: ClassVar[bool] = False

    @property
    def _loops(self) -> Loops | None:
        return None

    def for_shape(self, shape: tuple[int, ...]) -> Codec:
        """Return the codec for a tensor of ``shape``: this one, unless its options depend on the
        shape.  Those of all shapes have the same loops, but for the length of runs."""
        return self

    def unit(self, n: int) -> int:
        """Return the number of elements after which an array of ``n`` may be divided into shards.
        The shards decode to the same values as the whole."""
        return 1

    @abc.abstractmethod
    def size(self, n: int, dtype: np.dtype) -> int:
        """Return the number of bytes of ``n`` elements of ``dtype``, whatever their values."""

    @abc.abstractmethod
    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Return the bytes (1-D, uint8) of a flat, finite ``x``.

        Random codecs draw from ``random``, which belongs to this rank, tensor and step.  If
        something overflows although ``x`` is finite, the decoded values must not be finite either.
        """

    @abc.abstractmethod
    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        """Return ``n`` numbers of ``dtype``, a new array.  ``code`` has ``size(n, dtype)`` bytes,
        which come from another rank: whatever they are, the result is an array or a ``ValueError``.
        """

    def encode_to(self, x: np.ndarray, random: np.random.Generator, out: np.ndarray) -> None:
        """Write what ``encode`` returns to ``out``, ``size(n, dtype)`` bytes."""
        if (loops := self._loops) and is_compiled():
            loops.encode(as_loops_take(x), random, out)
        else:
            out[:] = self.encode(x, random)

    def decode_to(self, code: np.ndarray, out: np.ndarray, add: bool = False) -> None:
        """Write what ``decode`` returns to ``out`` (1-D, contiguous), or with ``add`` add it."""
        if (loops := self._loops) and is_compiled():
            loops.decode(code, out, add)
            return
        values = self.decode(code, out.size, out.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(out, values, out=out) if add else np.copyto(out, values)

    def take_off(self, code: np.ndarray, out: np.ndarray) -> None:
        """Subtract what ``decode`` returns from ``out`` (1-D, contiguous)."""
        if (loops := self._loops) and is_compiled():
            loops.decode(code, out, add=True, sign=-1)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(out, self.decode(code, out.size, out.dtype), out=out)

    def feed(
        self,
        base: np.ndarray,
        x: np.ndarray | None,
        kept: np.ndarray | None,
        codes: list[np.ndarray],
        random: np.random.Generator | None,
        left: np.ndarray,
        out: np.ndarray,
        count: int,
    ) -> tuple[bool, bool]:
        """Write the code of a sum of flat arrays of one dtype, and its error.

        If a sum is NaN or Inf, and the codec does not take these, there is no code: ``out`` and
        ``left`` are undefined then.

        Args:
            base: the first summand.
            x: the second one; ``None``: nothing.
            kept: where ``base`` is written, unless that is ``None``; it may be ``x``.
            codes: the values of these are added, too, one after the other.
            random: see :meth:`encode`.
            left: where the sums are written, and then their errors; it may be ``base``.
            out: where the code is written.
            count: of threads.

        Returns:
            Whether no sum is NaN or Inf, and whether no error is.
        """
        if (loops := self._loops_of(left)) and loops.feeds:
            draws = loops.drawn(random, left.size)
            found: tuple[bool, bool] = loops.bound_feed(
                base, x, kept, codes, draws, left, out, count
            )
            return found
        old = base.copy() if x is not None and kept is not None else base
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(left, base) if x is None else np.add(x, base, out=left)
            if kept is not None:
                np.copyto(kept, old)
            for code in codes:
                self.decode_to(code, left, add=True)
            if not self.takes_non_finite and not all_finite(left):
                return False, False
            self.encode_to(left, random, out)  # type: ignore[arg-type]
            self.take_off(out, left)
        return True, all_finite(left)

    def mean(
        self, codes: list[np.ndarray], by: int, out: np.ndarray, add: bool, count: int
    ) -> bool:
        """Write what a code decodes to, divided by a number, to ``out`` (1-D, contiguous); with
        ``add`` the sum of zero and several.  Return whether it was finite before.  It takes
        ``count`` threads."""
        if loops := self._loops_of(out):
            found: bool = loops.bound_mean(codes, by, out, add, count)
            return found
        if add:
            out.fill(0)
        for code in codes:
            self.decode_to(code, out, add)
        finite = all_finite(out)
        with np.errstate(over="ignore", invalid="ignore"):
            out /= by
        return finite

    def bound(self) -> Bound:
        """Return the functions that a plan calls for each tensor in every step: :meth:`feed` and
        :meth:`mean` for float32.  Compiled loops that need no generator are called directly."""
        if (loops := self._loops) is None or not is_compiled():
            return Bound(self.feed, self.mean)
        is_fed = loops.feeds and not loops.draws
        return Bound(loops.bound_feed if is_fed else self.feed, loops.bound_mean)

    def _loops_of(self, x: np.ndarray) -> Loops | None:
        """Return the loops that take whole sums, of float32, where they are compiled."""
        if x.dtype != np.float32 or not x.dtype.isnative or not x.size or not is_compiled():
            return None
        return self._loops

    def put(
        self,
        x: np.ndarray,
        random: np.random.Generator,
        out: np.ndarray,
        sent: np.ndarray | None = None,
    ) -> bool:
        """Write the bytes of a flat ``x`` to ``out``, and the values that they decode to into
        ``sent``.

        If ``x`` has a NaN or Inf, and the codec does not take these, draw nothing and return False;
        ``out`` is as it was then.
        """
        if not self.takes_non_finite and not all_finite(x):
            return False
        self.encode_to(x, random, out)
        if sent is not None:
            self.decode_to(out, sent)
        return True

    def check_feedback(self, d: int) -> None:
        """Raise ``ConfigError`` unless error feedback converges with this codec for ``d`` elements.

        The error of an unbiased codec with zeta >= 2 can be larger than its input.
        """
        if self.unbiased and d and (zeta := self.classes(d).zeta or 1.0) >= 2:
            raise ConfigError(
                f"{self!r} may change {d} elements by more than their norm (zeta = {zeta:.3g}, and "
                "error feedback needs less than 2): use more levels, a smaller bucket, or "
                "contraction(...) around it; or no error feedback, since it is unbiased"
            )

    def classes(self, d: int) -> Classes:
        """Return the constants in d dimensions, for step sizes and rates; see :class:`Classes`."""
        raise UnsupportedError(f"no constants are known for {self.name}")

    def bits_per_element(self, d: int) -> float:
        """Return the bits on the wire per element of an array of ``d`` float32."""
        return 8 * self.size(d, np.dtype(np.float32)) / d
