"""Adding up: operations, dtypes to accumulate in, and rounding once at the end."""

from __future__ import annotations

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
        self.widens = dtype in HALVES
        self._own: Any = np.dtype("uint16" if dtype == "bfloat16" else dtype)
        self._wide: Any = np.dtype("float32") if self.widens else self._own
        self._add = np.maximum if op == "max" else np.add
        self._free: dict[Any, list[Any]] = {}

    def scratch(self, n: int, wide: bool = True) -> Any:
        """Return an array for ``n`` partial results, or for elements of the array's own dtype, with
        any contents.  After :meth:`give_back` it is used again, since the first touch of fresh
        memory costs more than an addition."""
        dtype = self._wide if wide else self._own
        free = self._free.get((n, dtype))
        return free.pop() if free else np.empty(n, dtype)

    def give_back(self, *arrays: Any) -> None:
        """Keep arrays that :meth:`scratch` returned, and that nobody uses any more."""
        for array in arrays:
            self._free.setdefault((len(array), array.dtype), []).append(array)

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
            return
        x = halves.from_bfloat16(x) if self.dtype == "bfloat16" else x
        with np.errstate(invalid="ignore", over="ignore"):  # see add
            self._add(partial, x, out=partial)

    def add(self, first: Any, second: Any, out: Any) -> None:
        """Write the sum of two partial results, in this order, into ``out``."""
        # Inf - Inf is the caller's affair, and arrives as NaN on every rank.
        with np.errstate(invalid="ignore", over="ignore"):
            self._add(first, second, out=out)

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
