"""The form of an algorithm of a sparse allreduce, and the contents of its messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence

import numpy as np

from hvd_compress.base import Sparse
from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.meetings.sparse_vectors import Vector, add_up, densify, empty, pick
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.progress import Wait
from hvd_compress.wire import (
    decode,
    dense_is_shorter,
    encode_dense,
    encode_sparse,
)
from hvd_compress.wire.frame import CODECS, DTYPES


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of the messages of one call, the same on all ranks.

    Attributes:
        n: elements of the tensor.
        dtype: of the values that ranks bring, and of the result.
        wire: of values on the wire; narrower than ``dtype`` means that they are rounded.
        codec: of indices, see ``encode_sparse``.
        op, size: "sum" or "mean", and the number of ranks.
    """

    n: int
    dtype: str
    wire: str
    codec: str
    op: str
    size: int

    def __post_init__(self) -> None:
        check_choice("op", self.op, ("sum", "mean"))
        check_choice("indices", self.codec, CODECS)
        check_choice("values", self.wire, (None, *DTYPES))
        if np.dtype(self.wire).itemsize > np.dtype(self.dtype).itemsize:
            raise ConfigError(
                f"values={self.wire!r} is wider than the values, which are {self.dtype}"
            )

    @property
    def wide(self) -> str:
        """The dtype that sums are made in."""
        return "float32" if self.dtype == "float16" else self.dtype

    def __str__(self) -> str:
        return f"{self.dtype}[{self.n}] as {self.wire}, {self.codec}, {self.op}"

    # -- rounding ----------------------------------------------------------------------------

    def bring(self, mine: Sparse) -> tuple[Sparse, Sparse]:
        """Return what the others receive of ``mine``, and what rounding takes off."""
        if self.wire == self.dtype:
            return mine, empty(self.wide)
        rounded = Sparse(mine.indices, _narrow(mine.values, self.wire))
        return rounded, _difference(mine, rounded.values.astype(self.dtype))

    def settle(self, total: Vector) -> tuple[Vector, Sparse]:
        """Return a part of the result as it is sent, and what rounding takes off the sum.

        Rounding to the dtype of the result is part of every sum and not reported.
        """
        sums = total.values if isinstance(total, Sparse) else total
        result = self.finish(sums, self.wire)
        done = Sparse(total.indices, result) if isinstance(total, Sparse) else result
        if self.wire == self.dtype:
            return done, empty(self.wide)
        restored = result.astype(self.wide)
        if self.op == "mean":
            restored *= self.size
        if isinstance(total, Sparse):
            return done, _difference(total, restored)
        return done, _difference(Sparse(np.arange(total.size), total), restored)

    def result(self, total: Vector) -> Vector:
        """Return sums over all ranks as the result."""
        return with_values(total, lambda sums: self.finish(sums, self.dtype))

    def finish(self, sums: np.ndarray, dtype: str) -> np.ndarray:
        """Return sums over all ranks as values of the result."""
        if self.op == "mean":
            sums = sums / sums.dtype.type(self.size)
        if dtype != self.dtype:
            return _narrow(sums, dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            return sums.astype(dtype)

    def not_sent(self, parts: Sequence[Sparse]) -> Sparse:
        """Return the sum of the rounding errors.  Values that are not finite have reached everyone,
        and must not enter a residual."""
        finite = [pick(part, np.isfinite(part.values)) for part in parts]
        return add_up(finite, self.n, self.wide)  # type: ignore[return-value]

    # -- sparse or dense ---------------------------------------------------------------------

    def add_up(self, parts: Sequence[Vector], n: int, sent_as: str) -> Vector:
        """Return the sum of vectors of ``n`` elements, in the order of ``parts``; dense if it is
        shorter when it is sent as ``sent_as``."""
        return add_up(parts, n, self.wide, lambda count: self.is_full(count, n, sent_as))

    def is_full(self, count: int, n: int, dtype: str) -> bool:
        """Return whether ``count`` of ``n`` elements are shorter when they are sent dense."""
        return dense_is_shorter(count, n, dtype, self.codec)

    def present(self, total: Vector) -> Vector:
        """Return a result as callers get it: dense if that is shorter."""
        if isinstance(total, Sparse) and self.is_full(total.indices.size, self.n, self.dtype):
            return densify(total, self.n)
        return total

    # -- frames ------------------------------------------------------------------------------

    def encode(self, vector: Vector, n: int) -> np.ndarray:
        """Return a frame of a vector of ``n`` elements, a region of the whole."""
        if isinstance(vector, Sparse):
            return encode_sparse(vector.indices, vector.values, n, self.codec, self.n)
        return encode_dense(vector, whole=self.n)

    def decode(self, frame: np.ndarray, n: int, dtype: str, sender: int) -> Vector:
        """Undo :meth:`encode`; raise ``PayloadError`` if the frame is damaged."""
        indices, values = decode(frame, n, dtype, sender=f"rank {sender}", whole=self.n)
        values = values.astype(dtype)  # aligned, native and no view of the frame
        return values if indices is None else Sparse(indices.astype(np.int64), values)


#: what an algorithm returns: the result, and what rounding took off on this rank; it loses nothing
Summed = Generator[Wait, None, tuple[Vector, Sparse]]
#: ``run(channel, mine, form)``; one module has one, under its own name
Run = Callable[[Channel, Sparse, Format], Summed]


def _narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``x`` rounded to ``dtype``; what is too large becomes the largest number there is, and
    Inf stays Inf."""
    limit = float(np.finfo(dtype).max)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(np.isfinite(x), np.clip(x, -limit, limit), x).astype(dtype)


def _difference(exact: Sparse, values: np.ndarray) -> Sparse:
    """Return what ``values`` lack; nothing where ``exact`` is not finite, which always arrives."""
    with np.errstate(over="ignore", invalid="ignore"):
        rest = np.where(np.isfinite(exact.values), exact.values - values, 0)
    some = np.flatnonzero(rest)
    return Sparse(exact.indices[some], rest[some].astype(exact.values.dtype, copy=False))


def with_values(vector: Vector, change: Callable[[np.ndarray], np.ndarray]) -> Vector:
    """Return a vector with the same places, and other values."""
    if isinstance(vector, Sparse):
        return Sparse(vector.indices, change(vector.values))
    return change(vector)


def entries_of(vector: Vector) -> Sparse:
    """Return the nonzero elements of a vector."""
    if isinstance(vector, Sparse):
        return vector
    places = np.flatnonzero(vector)
    return Sparse(places, vector[places])
