"""Messages of a bucket: the selected entries of all its tensors end to end, with one header."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from hvd_compress.base import Context
from hvd_compress.codecs import logarithmic
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_sent
from hvd_compress.kernels import merge
from hvd_compress.operators import Selector
from hvd_compress.requests import Gather
from hvd_compress.wire.frame import (
    SparseFrames,
    decode,
    dense_is_shorter,
    encode_dense,
    encode_sparse,
    sparse_size,
)

#: the indices, into all tensors end to end, and the values of a rank
Entries = tuple[np.ndarray, np.ndarray]

_MOST_ELEMENTS = 2**32
_FLOAT32 = np.dtype(np.float32)


class Numbers:
    """Messages of a bucket whose values are numbers of a dtype.

    Attributes:
        size: the bytes of a message, ``None`` if they depend on what is in it.
    """

    def __init__(self, dtype: str, indices: str, n: int, counts: Sequence[int]) -> None:
        self._dtype, self._indices, self._n = dtype, indices, n
        self._frames = SparseFrames(sum(counts), n, dtype, indices)
        self.size = None if indices == "packed" else sparse_size(sum(counts), n, dtype)

    def encode(self, indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the message, and the values as receivers see them (float32)."""
        if self._dtype == "float16":
            limit = np.finfo(np.float16).max
            values = np.clip(values, -limit, limit)
        values = values.astype(self._dtype, copy=False)
        return self._framed(indices, values), values.astype(np.float32, copy=False)

    def _framed(self, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
        return self._frames.encode(indices, values)

    def decode(self, frame: np.ndarray, sender: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices and values (float32) in a message."""
        indices, values = self._frames.decode(frame, sender)
        return indices, values.astype(np.float32, copy=False)


class Unknown(Numbers):
    """Messages of as many numbers as their sender selects; see :class:`Numbers`."""

    def __init__(self, dtype: str, indices: str, n: int) -> None:
        super().__init__(dtype, indices, n, [])
        self.size = None

    def _framed(self, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
        if not dense_is_shorter(indices.size, self._n, self._dtype, self._indices):
            return encode_sparse(indices, values, self._n, self._indices)
        whole = np.zeros(self._n, self._dtype)
        whole[indices] = values
        return encode_dense(whole)

    def decode(self, frame: np.ndarray, sender: str) -> tuple[np.ndarray, np.ndarray]:
        indices, values = decode(frame, self._n, self._dtype, sender=sender)
        if indices is None:
            indices = np.arange(self._n)
        return indices, values.astype(np.float32, copy=False)


class CodedEntries:
    """Messages whose values are coded; see :class:`Numbers`."""

    def __init__(self, codec: logarithmic, indices: str, n: int, counts: Sequence[int]) -> None:
        self._codec, self._packed, self._n = codec.of_parts(counts), indices == "packed", n
        self._count = sum(counts)
        self._random = np.random.default_rng(0)  # which this codec does not ask
        self.size = None if self._packed else coded_size(self._codec, self._count, _FLOAT32, n)

    def encode(self, indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return encode_sent(self._codec, values, self._random, indices, self._n, packed=self._packed)

    def decode(self, frame: np.ndarray, sender: str) -> tuple[np.ndarray, np.ndarray]:
        count, n = self._count, self._n
        indices, values = decode_coded(self._codec, frame, count, _FLOAT32, n, sender=sender)
        assert indices is not None
        return indices, values


def message_of(
    values: str | logarithmic, indices: str, n: int, counts: Sequence[int | None]
) -> Numbers | CodedEntries:
    """Return the form of a message of ``counts`` entries of each tensor; all of them are ``None``
    if only the sender knows."""
    known = [count for count in counts if count is not None]
    if isinstance(values, str) and len(known) < len(counts):
        return Unknown(values, indices, n)
    if isinstance(values, str):
        return Numbers(values, indices, n, known)
    return CodedEntries(values, indices, n, known)


def gather_of(message: Numbers | CodedEntries) -> Gather:
    """Return a request like those of such messages, with what there is in fresh memory."""
    return Gather(np.empty(message.size or 0, np.uint8), message.size is not None)


def finite_of(sizes: Sequence[int], theirs: Sequence[Entries]) -> np.ndarray:
    """Return of which tensors all ranks' values are finite (bool)."""
    ends, finite = np.cumsum(sizes), np.ones(len(sizes), bool)
    for indices, values in theirs:
        if not (fine := np.isfinite(values)).all():
            finite[np.searchsorted(ends, indices[~fine], side="right")] = False
    return finite


def merged(sizes: Sequence[int], theirs: Sequence[Entries]) -> list[Entries]:
    """Return the average of each tensor, as the elements that any rank has sent."""
    indices, values = zip(*theirs, strict=True)
    places, mean = merge(indices, values, len(theirs))
    bounds = np.cumsum([0, *sizes])
    cuts = np.searchsorted(places, bounds)
    rows = zip(bounds, cuts, cuts[1:], strict=False)
    return [(places[a:b] - start, mean[a:b]) for start, a, b in rows]


def scattered(places: np.ndarray, values: np.ndarray) -> Callable[[np.ndarray], None]:
    """Return what writes an array with these elements, and zeros elsewhere."""
    return functools.partial(_scatter, places, values)


def _scatter(places: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    out.fill(0)
    out[places] = values


def part_of(select: Selector, values: str | logarithmic, context: Context) -> int | None:
    """Return the number of elements that are sent of a tensor of ``context.shape``.  ``None``: all,
    or more than a dense sum moves bytes for."""
    n = math.prod(context.shape)
    k = select.count(n, context) if 0 < n < _MOST_ELEMENTS else None
    if k is None or k == n:
        return None
    if isinstance(values, str) and dense_is_less(n, k, values, context.size):
        return None
    return k


def dense_is_less(n: int, k: int, values: str, size: int) -> bool:
    """Return whether a dense sum of ``n`` elements over ``size`` ranks moves fewer bytes than an
    allgather of ``k`` entries."""
    # A header and an entry more or less do not decide.
    entries = sparse_size(k, n, values) - sparse_size(1, n, values)
    return size * entries > 2 * 4 * n
