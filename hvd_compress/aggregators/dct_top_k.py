"""The largest cosine coefficients of every rank, and their mean over those that sent them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.aggregators.cosines import chunks_of, inverse, transform
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.config import check_choice, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.operators.top_k import largest_of_rows
from hvd_compress.requests import Gather, Request, Sum
from hvd_compress.wire import decode_sparse, dense_is_shorter, encode_sparse, sparse_size
from hvd_compress.wire.frame import CODECS, index_dtype


@dataclasses.dataclass(frozen=True)
class dct_top_k(Aggregator, name="dct_top_k"):
    """Cut the tensor into chunks, and send the ``top_k`` largest coefficients of each chunk's
    discrete cosine transform (DCT-II, orthonormal, of two dimensions).

    The direction of the step is not the average over the ranks, but for each coefficient the mean
    over those that sent it: what one rank alone sent counts in full.

    A chunk is no longer than ``chunk`` in each of two dimensions, and its sides divide the
    tensor's: of a prime number of rows each is a chunk of its own.  A tensor with more dimensions
    is taken for the matrix of neighbouring dimensions that has the largest chunks.  Tensors of
    which the coefficients and their places would take more bytes than the tensor are summed whole.

    Options:
        chunk: the longest side of a chunk.
        top_k: coefficients of a chunk that are sent.
        values: on the wire, "float32" or "float16"; with feedback what rounding takes off is kept.
        indices: on the wire, "packed", about log2(n / k) + 1.5 bits each, or "int32".

    Reference: Peng, Quesnelle, Kingma, DeMo, arXiv 2411.19870.  Differs from the released code in:
    contributions are added in the order of the ranks, so that all ranks hold the same bits; the
    matrix is not always that of the first dimension and all others; indices are packed.
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

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, dtype = xp.size(x), xp.dtype(x)
        chunks = chunks_of(context.shape, self.chunk)
        k = self.top_k * chunks.number
        if k >= n or dense_is_shorter(k, n, self.values, self.indices):
            total = yield Sum(x)
            mean = total / context.size
            return Aggregated(mean, x, xp.all_finite(mean), state)
        coefficients = transform(x, chunks)
        indices = largest_of_rows(xp.abs(coefficients), self.top_k)
        values = xp.take(xp.reshape(coefficients, (n,)), indices)
        values = xp.round_to(values, self.values, saturate=True)
        size = None if self.indices == "packed" else sparse_size(k, n, self.values)
        (frame,) = xp.on_host(
            functools.partial(_encode, n, self.indices),
            [indices, xp.cast(values, self.values)],
            [("uint8", size)],
            x,
        )
        frames = yield Gather(frame, equal_sizes=size is not None)
        parts = xp.on_host(
            functools.partial(_decode, n, k, self.values),
            frames,
            [(index_dtype(n), k), (self.values, k)] * context.size,
            x,
        )
        # In double precision: all ranks do what follows, and have to arrive at the same bits.  What
        # their processors make of the last bits of a double is rounded off at the end.
        zeros = xp.cast(xp.zeros(n, x), "float64")
        total, senders = xp.copy(zeros), xp.copy(zeros)
        for at, what in zip(parts[::2], parts[1::2], strict=True):
            what = xp.cast(what, "float64")
            total = xp.add_at(total, at, what)
            senders = xp.add_at(senders, at, xp.full_like(what, 1.0))
        own = xp.put(zeros, indices, xp.cast(values, "float64"))
        by_senders = total / xp.maximum(senders, xp.full_like(senders, 1.0))
        sent, mean, update = (
            xp.cast(inverse(array, chunks), dtype)
            for array in (own, total / context.size, by_senders)
        )
        finite = xp.all_finite(xp.concat(parts[1::2]))
        return Aggregated(mean, sent, finite, state, update)


def _encode(n: int, codec: str, indices: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
    return [encode_sparse(indices, values, n, codec)]


def _decode(n: int, k: int, values: str, *frames: np.ndarray) -> list[np.ndarray]:
    """Indices and values of every frame in turn."""
    parts: list[np.ndarray] = []
    for rank, frame in enumerate(frames):
        indices, decoded = decode_sparse(frame, n, values, k, sender=f"rank {rank}")
        parts += [indices.astype(index_dtype(n), copy=False), decoded]
    return parts
