"""How ranks meet, by a sum or by an allgather of messages; and the message of all values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Decoded, Encoded, Sparse, State
from hvd_compress.chain import Aggregated, Aggregation
from hvd_compress.config import choice
from hvd_compress.requests import Gather, Sum
from hvd_compress.wire.frame import decode_dense, encode_dense
from hvd_compress.wire.header import padded


@dataclasses.dataclass(frozen=True)
class whole(Coding, name="whole"):
    """Send all values.

    Options:
        wire: dtype on the wire, "float16" or "bfloat16"; ``None``: their own.

    >>> coding, x = whole("float16"), np.array([4.0, 1.001])
    >>> message, sent, _ = coding.encode(x, {}, Context())
    >>> message.size, coding.decode([message, message], x, Context()).total
    (24, array([8.        , 2.00195312]))
    """

    wire: str | None = choice(None, "float16", "bfloat16")

    def varies(self, n: int, context: Context) -> bool:
        return False

    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        xp = backend_of(x)
        wire = self.wire or xp.dtype(x)
        size = padded(xp.size(x) * (2 if self.wire else np.dtype(wire).itemsize))
        (message,) = xp.on_host(lambda x: [encode_dense(x, wire)], [x], [("uint8", size)], x)
        return Encoded(message, xp.round_to(x, self.wire), state)

    def decode(
        self,
        messages: Sequence[Array],
        like: Array,
        context: Context,
        ranks: Sequence[int] | None = None,
    ) -> Decoded:
        xp, senders = backend_of(like), ranks or range(len(messages))
        n, dtype = xp.size(like), xp.dtype(like)

        def add_up(*messages: np.ndarray) -> list[np.ndarray]:
            total = np.zeros(n, dtype)
            with np.errstate(over="ignore", invalid="ignore"):
                for rank, message in zip(senders, messages, strict=True):
                    sender = f"rank {rank}"
                    total += decode_dense(message, n, self.wire or dtype, sender=sender)
            return [total]

        (total,) = xp.on_host(add_up, messages, [(dtype, n)], like)
        return Decoded(total, xp.all_finite(total))


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
