"""Adding up: operations, dtypes to accumulate in, and rounding once at the end."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hvd_compress.backends import halves
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.mpi.transport.arrays import HALVES

OPS = ("sum", "mean", "max")


class Reduction:
    """``op`` over arrays of ``dtype``.

    Half precisions are added in float32, and partial results are sent as float32, so that the
    result is rounded once, however many ranks there are.

    Attributes:
        widens: partial results need another dtype than the array's.
    """

    def __init__(self, op: str, dtype: str, size: int) -> None:
        if op not in OPS:
            raise ConfigError(f"op={op!r} is not one of {', '.join(OPS)}")
        if op == "mean" and "int" in dtype:
            raise UnsupportedError(
                f'the mean of {dtype} is not an integer: use op="sum" and divide, or float arrays'
            )
        self.op, self.dtype, self.size = op, dtype, size
        self._free: dict[Any, list[Any]] = {}
        self.widens = dtype in HALVES

    def scratch(self, n: int, *, wide: bool = True) -> Any:
        """Return an array for ``n`` partial results, or for elements of the array's own dtype, with
        any contents.  After :meth:`give_back` it is used again, since the first touch of fresh
        memory costs more than an addition."""
        free = self._free.get((n, self._dtype(wide)))
        return free.pop() if free else self._new(n, self._dtype(wide))

    def give_back(self, *arrays: Any) -> None:
        """Keep arrays that :meth:`scratch` returned, and that nobody uses any more."""
        for array in arrays:
            self._free.setdefault((len(array), array.dtype), []).append(array)

    def _dtype(self, wide: bool) -> Any:
        if wide and self.widens:
            return np.dtype("float32")
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)

    def _new(self, n: int, dtype: Any) -> Any:
        return np.empty(n, dtype)

    def widen(self, x: Any, out: Any) -> None:
        """Write the elements ``x`` into ``out``, as partial results."""
        if self.widens:
            halves.widen(x, out, threads=1)
        else:
            out[:] = x

    def combine(self, partial: Any, x: Any) -> None:
        """Add elements as they came to partial results, in place."""
        if self.widens and self.op != "max":
            halves.widen(x, partial, add=True, threads=1)
        else:
            self.merge(partial, halves.from_bfloat16(x) if self.dtype == "bfloat16" else x)

    def merge(self, partial: Any, other: Any) -> None:
        """Add other partial results to partial results, in place."""
        self.add(partial, other, partial)

    def add(self, first: Any, second: Any, out: Any) -> None:
        """Write the sum of two partial results, in this order, into ``out``."""
        # Inf - Inf is the caller's affair, and arrives as NaN on every rank.
        with np.errstate(invalid="ignore", over="ignore"):
            (np.maximum if self.op == "max" else np.add)(first, second, out=out)

    def complete(self, partial: Any, x: Any, out: Any) -> None:
        """Do the last :meth:`combine`, and :meth:`finish`; ``out`` may be ``x``."""
        if self.widens:
            self.combine(partial, x)
            self.finish(partial, out)
            return
        self.add(partial, x, out)
        if self.op == "mean":
            np.divide(out, self.size, out=out)

    def finish(self, partial: Any, out: Any) -> None:
        """Write partial results over all ranks into ``out``, as the result."""
        if self.op == "mean":
            np.divide(partial, self.size, out=partial)
        if self.widens:
            halves.narrow(partial, out, threads=1)
        else:
            out[:] = partial


class DeviceReduction(Reduction):
    """A reduction of torch tensors, for an MPI that reads GPU memory."""

    def __init__(self, op: str, dtype: str, size: int, like: Any) -> None:
        super().__init__(op, dtype, size)
        self._torch = sys.modules["torch"]
        self._like = like

    def combine(self, partial: Any, x: Any) -> None:
        self.merge(partial, x)

    def _dtype(self, wide: bool) -> Any:
        return self._torch.float32 if wide and self.widens else self._like.dtype

    def _new(self, n: int, dtype: Any) -> Any:
        return self._like.new_empty(n, dtype=dtype)

    def complete(self, partial: Any, x: Any, out: Any) -> None:
        self.combine(partial, x)
        self.finish(partial, out)

    def widen(self, x: Any, out: Any) -> None:
        out.copy_(x)

    def merge(self, partial: Any, other: Any) -> None:
        if self.op == "max":
            self._torch.maximum(partial, other.to(partial.dtype), out=partial)
        else:
            partial.add_(other)

    def add(self, first: Any, second: Any, out: Any) -> None:
        (self._torch.maximum if self.op == "max" else self._torch.add)(first, second, out=out)

    def finish(self, partial: Any, out: Any) -> None:
        if self.op == "mean":
            partial.div_(self.size)
        out.copy_(partial)


def reduction_of(op: str, dtype: str, array: Any, size: int) -> Reduction:
    """Return the reduction for a flat array in host memory or on a device."""
    if isinstance(array, np.ndarray):
        return Reduction(op, dtype, size)
    return DeviceReduction(op, dtype, size, array)
