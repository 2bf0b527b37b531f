"""Sparse methods: every rank's choice goes to every rank, which adds them up in rank order."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backend import backend_of
from hvd_compress.base import Array, Context, Gather, Request, Sparse, State, Sum
from hvd_compress.chain import Aggregator, Met
from hvd_compress.config import check_choice
from hvd_compress.operators import top_k
from hvd_compress.wire import decode_sparse, encode_sparse, sparse_size
from hvd_compress.wire.frame import index_dtype


@dataclasses.dataclass(frozen=True)
class allgather(Aggregator, name="allgather"):
    """Gather the elements that ``select`` picks.

    Options:
        select: ``top_k``.
        values: dtype of the values on the wire, "float32" or "float16".  Values beyond the range
            of float16 are sent as its largest, and error feedback keeps the rest.

    An allgather delivers P messages to everyone, an allreduce about two dense arrays.  Where the
    former is more (density 25 % on more than 4 ranks, say), the same choice of elements travels in
    a dense sum: the result is the same up to the order of additions.
    """

    select: top_k = top_k()
    values: str = "float32"

    def __post_init__(self) -> None:
        check_choice("values", self.values, ("float32", "float16"))
        if not isinstance(self.select, top_k):
            raise TypeError(
                f"allgather(select=...) takes an operator such as top_k(); got {self.select!r}"
            )

    @property
    def needs_epoch(self) -> bool:
        return self.select.needs_epoch

    def meet(self, x: Array, state: State, context: Context) -> Generator[Request, Any, Met]:
        xp = backend_of(x)
        n = xp.size(x)
        k = self.select.count(n, context)
        if k == n:
            total = yield Sum(x)
            mean = total / context.size
            return Met(mean, x, xp.all_finite(mean))

        indices = self.select.select(x, k, context)
        values = xp.round_to(xp.take(x, indices), self.values, saturate=True)
        sent = Sparse(indices, values)
        # A header and an entry more or less do not decide.
        entries = sparse_size(k, n, self.values) - sparse_size(1, n, self.values)
        if context.size * entries > 2 * 4 * n:
            total = yield Sum(xp.put(xp.zeros(n, x), indices, values))
            mean = total / context.size
            return Met(mean, sent, xp.all_finite(mean))

        size = sparse_size(k, n, self.values)
        (frame,) = xp.on_host(
            functools.partial(_encode, n),
            [indices, xp.cast(values, self.values)],
            [("uint8", size)],
            x,
        )
        frames = yield Gather(frame, equal_sizes=True)
        parts = xp.on_host(
            functools.partial(_decode, n, self.values, k),
            frames,
            [(index_dtype(n), k), (self.values, k)] * context.size,
            x,
        )
        mean = xp.zeros(n, x)
        for at, what in zip(parts[::2], parts[1::2], strict=True):
            mean = xp.add_at(mean, at, xp.cast(what, xp.dtype(x)))
        # Dividing the few nonzero elements would be cheaper, but they are not unique.
        mean /= context.size
        return Met(mean, sent, xp.all_finite(xp.concat(parts[1::2])))


def _encode(n: int, indices: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    return [encode_sparse(indices, values, n)]


def _decode(n: int, values: str, k: int, *frames: np.ndarray) -> list[np.ndarray]:
    """Indices and values of every frame in turn."""
    parts: list[np.ndarray] = []
    for rank, frame in enumerate(frames):
        parts += decode_sparse(frame, n, values, k, sender=f"rank {rank}")
    return parts
