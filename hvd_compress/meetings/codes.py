"""All values, in the codes of a codec."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Encoded, State
from hvd_compress.codecs import Codec
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_sent
from hvd_compress.errors import ConfigError
from hvd_compress.meetings.averaging import Added


@dataclasses.dataclass(frozen=True)
class codes(Added, name="codes"):
    """Send all values by a codec.

    Options:
        codec: such as ``linear(8)``.

    >>> coding, x = codes(linear(8, column=512)), np.ones(10_000, np.float32)
    >>> message, sent, _ = coding.encode(x, {}, Context())
    >>> message.size, coding.decode([message], x, Context()).total[:3]
    (10096, array([1., 1., 1.], dtype=float32))
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ConfigError(f"codes takes a codec such as linear(8); got {self.codec!r}")

    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        xp = backend_of(x)
        n, dtype = xp.size(x), np.dtype(xp.dtype(x))

        def encode(step: int, x: np.ndarray) -> list[np.ndarray]:
            return list(encode_sent(self.codec, x, own_generator(context._replace(step=step))))

        outputs = [("uint8", coded_size(self.codec, n, dtype)), (dtype.name, n)]
        message, sent = xp.on_host(encode, [context.step, x], outputs, x)
        return Encoded(message, sent, state)

    def add_to(self, total: np.ndarray, message: np.ndarray, context: Context) -> None:
        of = self.codec, message, total.size, total.dtype
        decode_coded(*of, sender=f"rank {context.rank}", out=total, add=True)
