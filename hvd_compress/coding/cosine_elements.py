"""The largest cosine coefficients of each chunk of a tensor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.coding.base import Coding, Decoded, Encoded
from hvd_compress.coding.cosines import Chunks, chunks_of, inverse, transform
from hvd_compress.config import check_choice, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.operators.top_k import largest_of_rows
from hvd_compress.wire import decode_sparse, dense_is_shorter, encode_sparse, sparse_size
from hvd_compress.wire.frame import CODECS, index_dtype


@dataclasses.dataclass(frozen=True)
class cosine_elements(Coding, name="cosine_elements"):
    """Cut the tensor into chunks, and send the ``top_k`` largest coefficients of each chunk's
    discrete cosine transform (DCT-II, orthonormal, of two dimensions).

    ``update`` of what is decoded is for each coefficient the mean over those ranks that sent it.
    ``context.shape`` is the tensor's shape.

    A chunk is no longer than ``chunk`` in each of two dimensions, and its sides divide the
    tensor's: of a prime number of rows each is a chunk of its own.  A tensor with more dimensions
    is taken for the matrix of neighbouring dimensions that has the largest chunks.

    Options:
        chunk: the longest side of a chunk.
        top_k: coefficients of a chunk that are sent.
        values: on the wire, "float32" or "float16".
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".

    Reference: Peng, Quesnelle, Kingma, DeMo, arXiv 2411.19870.

    One coefficient is all of a constant:

    >>> coding, x = cosine_elements(chunk=8, top_k=1), np.full(64, 3.0)
    >>> context = Context(shape=(8, 8))
    >>> message, sent, _ = coding.encode(x, {}, context)
    >>> message.size, coding.decode([message], x, context).total[:3].round(6)
    (24, array([3., 3., 3.]))
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

    def varies(self, n: int, context: Context) -> bool:
        return self.indices == "packed"

    def saves(self, n: int, context: Context) -> bool:
        """Return whether coefficients and their places take fewer bytes than ``n`` elements."""
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
