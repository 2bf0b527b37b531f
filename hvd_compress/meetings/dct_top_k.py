"""The largest cosine coefficients of every rank, and their mean over those that sent them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Decoded, Encoded, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.config import check_choice, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.meetings.averaging import gathered, summed
from hvd_compress.meetings.cosines import Chunks, chunks_of, inverse, transform
from hvd_compress.meetings.whole import whole
from hvd_compress.operators.top_k import largest_of_rows
from hvd_compress.requests import Request
from hvd_compress.wire import decode_sparse, dense_is_shorter, encode_sparse, sparse_size
from hvd_compress.wire.frame import CODECS, index_dtype


@dataclasses.dataclass(frozen=True)
class dct_top_k(Aggregator, Coding, name="dct_top_k"):
    """Cut the tensor into chunks, and send the ``top_k`` largest coefficients of each chunk's
    discrete cosine transform (DCT-II, orthonormal, of two dimensions).

    The direction of the step is not the average over the ranks, but for each coefficient the mean
    over those that sent it: what one rank alone sent counts in full.

    Tensors of which the coefficients and their places would take more bytes than the tensor are
    summed whole.

    A chunk is no longer than ``chunk`` in each of two dimensions, and its sides divide the
    tensor's: of a prime number of rows each is a chunk of its own.  A tensor with more dimensions
    is taken for the matrix of neighbouring dimensions that has the largest chunks.

    Options:
        chunk: the longest side of a chunk.
        top_k: coefficients of a chunk that are sent.
        values: on the wire, "float32" or "float16".
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".

    Reference: Peng, Quesnelle, Kingma, DeMo, arXiv 2411.19870.  Differs from the released code in:
    contributions are added in the order of the ranks, so that all ranks hold the same bits; the
    matrix is not always that of the first dimension and all others; indices are packed.

    A constant that one rank sends, and the other does not:

    >>> wave = np.ones((8, 1)) * np.cos(np.pi * (np.arange(8) + 0.5) / 8)
    >>> world = World(chain(via=dct_top_k(chunk=8, top_k=1)), size=2)
    >>> outcome = world.exchange([np.full((8, 8), 3.0), wave])[0]
    >>> outcome.mean.mean().round(6).item(), outcome.direction.mean().round(6).item()
    (1.5, 3.0)
    """

    chunk: int = 64
    top_k: int = 32
    values: str = "float32"
    indices: str = "packed"

    def __post_init__(self) -> None:
        for name in ("chunk", "top_k"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise ConfigError(f"{name} must be a whole number, 1 or more; got {value!r}")
        check_choice("values", self.values, ("float32", "float16"))
        check_choice("indices", self.indices, CODECS)

    def coding(self, n: int, context: Context) -> Coding:
        return self if self._saves(n, context) else whole()

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        if not self._saves(backend_of(x).size(x), context):
            return (yield from summed(x, state, context))
        return (yield from gathered(self, self.encode(x, state, context), x, context))

    def varies(self, n: int, context: Context) -> bool:
        return self.indices == "packed"

    def _saves(self, n: int, context: Context) -> bool:
        k = self.top_k * self._chunks(context).number
        return k < n and not dense_is_shorter(k, n, self.values, self.indices)

    def _chunks(self, context: Context) -> Chunks:
        return chunks_of(context.shape, self.chunk)

    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        xp, n, chunks = backend_of(x), backend_of(x).size(x), self._chunks(context)
        coefficients = transform(x, chunks)
        indices = largest_of_rows(xp.abs(coefficients), self.top_k)
        values = xp.take(xp.reshape(coefficients, (n,)), indices)
        values = xp.round_to(values, self.values, saturate=True)
        k = self.top_k * chunks.number
        (message,) = xp.on_host(
            lambda indices, values: [encode_sparse(indices, values, n, self.indices)],
            [indices, xp.cast(values, self.values)],
            [("uint8", None if self.indices == "packed" else sparse_size(k, n, self.values))],
            x,
        )
        own = xp.put(xp.cast(xp.zeros(n, x), "float64"), indices, xp.cast(values, "float64"))
        return Encoded(message, xp.cast(inverse(own, chunks), xp.dtype(x)), state)

    def decode(
        self,
        messages: Sequence[Array],
        like: Array,
        context: Context,
        ranks: Sequence[int] | None = None,
    ) -> Decoded:
        xp, n, chunks = backend_of(like), backend_of(like).size(like), self._chunks(context)
        k = self.top_k * chunks.number
        parts = xp.on_host(
            functools.partial(_decode, ranks or range(len(messages)), n, k, self.values),
            messages,
            [(index_dtype(n), k), (self.values, k)] * len(messages),
            like,
        )
        # In double precision: all ranks do what follows, and have to arrive at the same bits.  What
        # their processors make of the last bits of a double is rounded off at the end.
        zeros = xp.cast(xp.zeros(n, like), "float64")
        total, senders = xp.copy(zeros), xp.copy(zeros)
        for at, what in zip(parts[::2], parts[1::2], strict=True):
            what = xp.cast(what, "float64")
            total = xp.add_at(total, at, what)
            senders = xp.add_at(senders, at, xp.full_like(what, 1.0))
        by_senders = total / xp.maximum(senders, xp.full_like(senders, 1.0))
        total, update = (
            xp.cast(inverse(array, chunks), xp.dtype(like)) for array in (total, by_senders)
        )
        return Decoded(total, xp.all_finite(xp.concat(parts[1::2])), update)


def _decode(
    senders: Sequence[int], n: int, k: int, values: str, *messages: np.ndarray
) -> list[np.ndarray]:
    """Indices and values of every message in turn."""
    parts: list[np.ndarray] = []
    for rank, message in zip(senders, messages, strict=True):
        indices, decoded = decode_sparse(message, n, values, k, sender=f"rank {rank}")
        parts += [indices.astype(index_dtype(n), copy=False), decoded]
    return parts
