"""Some elements, with their indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Decoded, Encoded, Sparse, State
from hvd_compress.codecs import Codec, Selector, logarithmic
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_sent
from hvd_compress.config import check_choice, choice, converted
from hvd_compress.errors import ConfigError
from hvd_compress.wire import (
    decode,
    decode_sparse,
    dense_is_shorter,
    encode_dense,
    encode_sparse,
    sparse_size,
)
from hvd_compress.wire.frame import CODECS, index_dtype


def as_values(values: Any) -> str | Codec:
    """Return how values are sent, of an option ``values``."""
    if isinstance(values, Codec):
        return values
    if not isinstance(values, str):
        raise ConfigError(
            f"values must be 'float32', 'float16', '4bit' or a codec such as natural(); got "
            f"{values!r}"
        )
    check_choice("values", values, ("float32", "float16", "4bit"))
    return logarithmic(4) if values == "4bit" else values


@dataclasses.dataclass(frozen=True)
class elements(Coding, name="elements"):
    """Send the elements that ``select`` picks.

    Options:
        select: an operator such as ``top_k``.
        values: how the picked values are sent: "float32", "float16" (values beyond its range are
            sent as its largest), "4bit", which is ``logarithmic(4)``, or another codec.
        indices: "packed", about log2(n / k) + 1.5 bits each, in messages whose size is not known
            beforehand; or "int32" (int64 in tensors of more than 2^31 elements).

    Bytes an element, with index:

    >>> x = np.random.default_rng(0).standard_normal(100_000, np.float32)
    >>> coding = elements(top_k(0.01), values="4bit")
    >>> message, sent, _ = coding.encode(x, {}, Context())
    >>> message.size / sent.indices.size, coding.decode([message], x, Context()).total.shape
    (1.552, (100000,))
    """

    select: Selector
    values: str | Codec = dataclasses.field(default="float32", metadata=converted(as_values))
    indices: str = choice(*CODECS, default="packed")

    def varies(self, n: int, context: Context) -> bool:
        return self._packs(self.select.count(n, context))

    def _packs(self, k: int | None) -> bool:
        # Where the size may vary, indices may be packed; many of them would outweigh their codes.
        return self.indices == "packed" or k is None

    def pick(self, x: Array, context: Context) -> Sparse:
        """Return the elements that are selected, as they are."""
        xp = backend_of(x)
        indices = self.select.select(x, self.select.count(xp.size(x), context), context)
        return Sparse(indices, xp.take(x, indices))

    def rounded(self, picked: Sparse) -> Sparse:
        """Return elements with their values as they are sent, if as numbers."""
        xp = backend_of(picked.values)
        return picked._replace(values=xp.round_to(picked.values, self.values, saturate=True))

    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        return Encoded(*self.pack(self.pick(x, context), x, context), state)

    def pack(self, picked: Sparse, like: Array, context: Context) -> tuple[Array, Sparse]:
        """Return the message of elements of an array like ``like``, and the elements in it."""
        xp = backend_of(like)
        n, k = xp.size(like), self.select.count(xp.size(like), context)
        if isinstance(self.values, Codec):
            return self._coded(self.values, picked, n, k, context)
        sent = self.rounded(picked)
        size = None if self._packs(k) else sparse_size(k or 0, n, self.values)

        def encode(indices: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
            if k is None and dense_is_shorter(indices.size, n, values.dtype.name, self.indices):
                dense = np.zeros(n, values.dtype)
                dense[indices] = values
                return [encode_dense(dense)]
            return [encode_sparse(indices, values, n, self.indices)]

        parts = [sent.indices, xp.cast(sent.values, self.values)]
        (message,) = xp.on_host(encode, parts, [("uint8", size)], like)
        return message, sent

    def _coded(
        self, codec: Codec, picked: Sparse, n: int, k: int | None, context: Context
    ) -> tuple[Array, Sparse]:
        xp = backend_of(picked.values)
        packed, dtype = self._packs(k), np.dtype(xp.dtype(picked.values))

        def encode(step: int, indices: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
            random = own_generator(context._replace(step=step))
            return list(encode_sent(codec, values, random, indices, n, packed=packed))

        size = None if packed else coded_size(codec, k or 0, dtype, n)
        outputs = [("uint8", size), (dtype.name, k)]
        message, values = xp.on_host(encode, [context.step, *picked], outputs, picked.values)
        return message, picked._replace(values=values)

    def decode(
        self,
        messages: Sequence[Array],
        like: Array,
        context: Context,
        ranks: Sequence[int] | None = None,
    ) -> Decoded:
        xp, senders = backend_of(like), ranks or range(len(messages))
        n, dtype = xp.size(like), xp.dtype(like)
        k = self.select.count(n, context)
        codec = self.values if isinstance(self.values, Codec) else None
        values = dtype if codec is not None else str(self.values)

        def read(*messages: np.ndarray) -> list[Any]:
            parts: list[Any] = []
            for rank, message in zip(senders, messages, strict=True):
                sender = f"rank {rank}"
                if codec is not None:
                    parts += decode_coded(codec, message, k, np.dtype(dtype), n, sender=sender)
                    continue
                if k is None:
                    indices, decoded = decode(message, n, values, sender=sender)
                else:
                    indices, decoded = decode_sparse(message, n, values, k, sender=sender)
                if indices is None:
                    indices = np.arange(n)
                parts += [indices.astype(index_dtype(n), copy=False), decoded]
            return parts

        looks = [(index_dtype(n), k), (values, k)] * len(messages)
        parts = xp.on_host(read, messages, looks, like)
        total = xp.zeros(n, like)
        for at, what in zip(parts[::2], parts[1::2], strict=True):
            total = xp.add_at(total, at, xp.cast(what, dtype))
        return Decoded(total, xp.all_finite(xp.concat(parts[1::2])))
