"""Adding up: operations, dtypes to accumulate in, and rounding once at the end."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hvd_compress.backends import halves
from hvd_compress.errors import ConfigError, UnsupportedError

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
        self._free: dict[int, list[Any]] = {}  # partial results, by their number
        self._free_of_dtype: dict[int, list[Any]] = {}
        self.widens = dtype in ("float16", "bfloat16")

    def scratch(self, n: int) -> Any:
        """Return an array for ``n`` partial results, with any contents.  After :meth:`give_back` it
        is used again, since the first touch of fresh memory costs more than an addition."""
        free = self._free.get(n)
        return free.pop() if free else self._new(n)

    def give_back(self, *arrays: Any) -> None:
        """Keep arrays that :meth:`scratch` returned, and that nobody uses any more."""
        for array in arrays:
            self._free.setdefault(len(array), []).append(array)

    def scratch_of_dtype(self, n: int) -> Any:
        """Return an array for ``n`` elements of the array's own dtype, with any contents; after
        :meth:`give_back_of_dtype` it is used again."""
        free = self._free_of_dtype.get(n)
        return free.pop() if free else self._new_of_dtype(n)

    def give_back_of_dtype(self, *arrays: Any) -> None:
        """Do what :meth:`give_back` does, with arrays of :meth:`scratch_of_dtype`."""
        for array in arrays:
            self._free_of_dtype.setdefault(len(array), []).append(array)

    def _new(self, n: int) -> Any:
        return np.empty(n, self._wide)

    def _new_of_dtype(self, n: int) -> Any:
        return np.empty(n, self._narrow)

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
        if self.op == "max":
            np.maximum(partial, other, out=partial)
        else:
            # Inf - Inf is the caller's affair, and arrives as NaN on every rank.
            with np.errstate(invalid="ignore", over="ignore"):
                np.add(partial, other, out=partial)

    def add(self, first: Any, second: Any, out: Any) -> None:
        """Write the sum of two partial results, in this order, into ``out``, which is neither."""
        if self.op == "max":
            np.maximum(first, second, out=out)
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                np.add(first, second, out=out)

    def complete(self, partial: Any, x: Any, out: Any) -> None:
        """Do the last :meth:`combine`, and :meth:`finish`; ``out`` may be ``x``."""
        if self.widens:
            self.combine(partial, x)
            self.finish(partial, out)
            return
        with np.errstate(invalid="ignore", over="ignore"):
            (np.maximum if self.op == "max" else np.add)(partial, x, out=out)
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

    @property
    def _narrow(self) -> np.dtype:
        return np.dtype("uint16" if self.dtype == "bfloat16" else self.dtype)

    @property
    def _wide(self) -> np.dtype:
        return np.dtype("float32") if self.widens else self._narrow


class DeviceReduction(Reduction):
    """A reduction of torch tensors, for an MPI that reads GPU memory."""

    def __init__(self, op: str, dtype: str, size: int, like: Any) -> None:
        super().__init__(op, dtype, size)
        self._torch = sys.modules["torch"]
        self._like = like

    def combine(self, partial: Any, x: Any) -> None:
        self.merge(partial, x)

    def _new(self, n: int) -> Any:
        return self._like.new_empty(n, dtype=self._torch.float32 if self.widens else None)

    def complete(self, partial: Any, x: Any, out: Any) -> None:
        self.combine(partial, x)
        self.finish(partial, out)

    def _new_of_dtype(self, n: int) -> Any:
        return self._like.new_empty(n)

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
