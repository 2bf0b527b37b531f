"""How ranks meet, by a sum or by an allgather of messages; and the message of all values."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Decoded, Encoded, Sparse, State
from hvd_compress.chain import Aggregated, Aggregation
from hvd_compress.config import choice
from hvd_compress.requests import Gather, Sum
from hvd_compress.wire.frame import decode_dense, encode_dense
from hvd_compress.wire.header import padded


class Added(Coding):
    """The base of codings whose messages are added up in host memory, one after the other, and have
    sizes that all ranks know."""

    def varies(self, n: int, context: Context) -> bool:
        return False

    @abc.abstractmethod
    def add_to(self, total: np.ndarray, message: np.ndarray, context: Context) -> None:
        """Add what the message of the context's rank holds."""

    def decode(
        self,
        messages: Sequence[Array],
        like: Array,
        context: Context,
        ranks: Sequence[int] | None = None,
    ) -> Decoded:
        xp, senders = backend_of(like), ranks or range(len(messages))
        n, dtype = xp.size(like), xp.dtype(like)

        def add_up(step: Any, *messages: np.ndarray) -> list[np.ndarray]:
            total = np.zeros(n, dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                for rank, message in zip(senders, messages, strict=True):
                    self.add_to(total, message, context._replace(step=step, rank=rank))
            return [total]

        (total,) = xp.on_host(add_up, [context.step, *messages], [(dtype, n)], like)
        return Decoded(total, xp.all_finite(total))


@dataclasses.dataclass(frozen=True)
class whole(Added, name="whole"):
    """Send all values.

    Options:
        wire: dtype on the wire, "float16" or "bfloat16"; ``None``: their own.

    >>> coding, x = whole("float16"), np.array([4.0, 1.001])
    >>> message, sent, _ = coding.encode(x, {}, Context())
    >>> message.size, coding.decode([message, message], x, Context()).total
    (24, array([8.        , 2.00195312]))
    """

    wire: str | None = choice(None, "float16", "bfloat16")

    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        return Encoded(packed(x, self.wire), backend_of(x).round_to(x, self.wire), state)

    def add_to(self, total: np.ndarray, message: np.ndarray, context: Context) -> None:
        wire, sender = self.wire or total.dtype.name, f"rank {context.rank}"
        total += decode_dense(message, total.size, wire, sender=sender)


def packed(x: Array, wire: str | None) -> Array:
    """Return the message of the values of ``x``, which are sent as ``wire``."""
    xp = backend_of(x)
    dtype = wire or xp.dtype(x)
    size = padded(xp.size(x) * (2 if wire else np.dtype(dtype).itemsize))
    return xp.on_host(lambda own: [encode_dense(own, dtype)], [x], [("uint8", size)], x)[0]


def summed(
    x: Array,
    state: State,
    context: Context,
    wire: str | None = None,
    algorithm: str | None = None,
) -> Aggregation:
    """Average all elements of the flat ``x``, in a sum; see :class:`hvd_compress.requests.Sum`."""
    xp = backend_of(x)
    total = yield Sum(x, wire, algorithm)
    mean = xp.divided(total, context.size)
    return Aggregated(mean, xp.round_to(x, wire), xp.all_finite(mean), state)


def summed_densely(own: Sparse, like: Array, state: State, context: Context) -> Aggregation:
    """Average elements of an array like ``like`` in a sum of all its elements, which moves fewer
    bytes than the messages of many ranks."""
    xp = backend_of(like)
    dense = xp.put(xp.zeros(xp.size(like), like), own.indices, own.values)
    aggregated = yield from summed(dense, state, context)
    return aggregated._replace(sent=own)


def gathered(coding: Coding, own: Encoded, like: Array, context: Context) -> Aggregation:
    """Give every rank the messages of all, of arrays like ``like``; each adds them up in the order
    of the ranks."""
    varies = coding.varies(backend_of(like).size(like), context)
    messages = yield Gather(own.message, equal_sizes=not varies)
    total, finite, update = coding.decode(messages, like, context)
    mean = backend_of(like).divided(total, context.size)
    return Aggregated(mean, own.sent, finite, own.state, update)
