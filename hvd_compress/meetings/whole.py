"""All values as they are, or in half precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Decoded, Encoded, State
from hvd_compress.config import choice
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
