"""Codecs that have compiled loops beside their definition in NumPy."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from hvd_compress.codecs.base import Codec
from hvd_compress.kernels import is_compiled
from hvd_compress.kernels.codecs import Finite, Loops, Sums, as_loops_take


class Compiled(Codec):
    """``_to_bytes`` and ``_from_bytes`` say in NumPy what a code is; ``_loops`` writes the same
    bits in one pass, without arrays in between, where the loops are compiled."""

    @property
    @abc.abstractmethod
    def _loops(self) -> Loops | None:
        """``None`` where options are such that NumPy has to serve."""

    @abc.abstractmethod
    def _to_bytes(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """See ``encode``."""

    @abc.abstractmethod
    def _from_bytes(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        """See ``decode``."""

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        code = np.empty(self.size(x.size, x.dtype), np.uint8)
        self.encode_to(x, random, code)
        return code

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        values = np.empty(n, dtype)
        self.decode_to(code, values)
        return values

    def encode_to(self, x: np.ndarray, random: np.random.Generator, out: np.ndarray) -> None:
        if (loops := self._loops) and is_compiled():
            loops.encode(as_loops_take(x), random, out)
        else:
            out[:] = self._to_bytes(x, random)

    def decode_to(self, code: np.ndarray, out: np.ndarray, add: bool = False) -> None:
        if (loops := self._loops) and is_compiled():
            loops.decode(code, out, add)
            return
        values = self._from_bytes(code, out.size, out.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add(out, values, out=out) if add else np.copyto(out, values)

    def take_off(self, code: np.ndarray, out: np.ndarray) -> None:
        if (loops := self._loops) and is_compiled():
            loops.decode(code, out, add=True, sign=-1)
            return
        super().take_off(code, out)

    def feed(self, sums: Sums, random: np.random.Generator | None, out: np.ndarray) -> Finite:
        if (loops := self._loops_of(sums.left)) and loops.feeds:
            return loops.feed(sums, random, out)
        return super().feed(sums, random, out)

    def mean(self, codes: Sequence[np.ndarray], by: int, out: np.ndarray, add: bool) -> bool:
        if loops := self._loops_of(out):
            return loops.mean(codes, by, out, add)
        return super().mean(codes, by, out, add)

    def _loops_of(self, x: np.ndarray) -> Loops | None:
        """Return those that take whole sums, of float32, where they are compiled."""
        if x.dtype != np.float32 or not x.dtype.isnative or not x.size or not is_compiled():
            return None
        return self._loops
