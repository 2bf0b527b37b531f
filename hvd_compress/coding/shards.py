"""Sums that are coded twice: on the way to the owner of a shard, and on the way back."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Coder
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_coded
from hvd_compress.operators.random_k import own_generator
from hvd_compress.sharding import shards_of


@dataclasses.dataclass(frozen=True)
class Shards:
    """The part of a rank in a sum that is coded twice.

    Attributes:
        shards: the elements of each rank.
        context: the rank, and what its random numbers follow from.
        n, dtype: of the flat array.
    """

    shards: list[slice]
    context: Context
    n: int
    dtype: np.dtype

    @classmethod
    def of(cls, codec: Codec, n: int, dtype: np.dtype, context: Context) -> Shards:
        """Return the shards of an array of ``n`` elements."""
        return cls(shards_of(n, context.size, codec.unit(n)), context, n, dtype)

    def sizes(self, codec: Codec) -> list[int]:
        """Return the bytes of the message for each rank."""
        return [coded_size(codec, s.stop - s.start, self.dtype) for s in self.shards]

    def _random(self, step: int, turn: int) -> np.random.Generator:
        return own_generator(self.context._replace(step=step), turn)

    @property
    def _own(self) -> slice:
        return self.shards[self.context.rank]

    def _decode(
        self, coder: Coder, message: np.ndarray, sender: int, out: Array, add: bool = False
    ) -> None:
        """Write what a message holds to ``out``, or add it."""
        name, n = f"rank {sender}", backend_of(out).size(out)
        decode_coded(coder, message, n, self.dtype, sender=name, out=out, add=add)

    def encode(self, coder: Coder, step: int, x: Array, owner_residual: Array) -> list[Array]:
        """Return a message for each rank; and what they hold, less what came from
        ``owner_residual``."""
        foreign = backend_of(owner_residual).copy(owner_residual)
        foreign[self._own] = 0
        moved = bool(foreign.any())  # the shards did
        x = x + foreign if moved else x
        random, sent = self._random(step, 0), coder.zeros(self.n, self.dtype)
        messages = [encode_coded(coder, x[own], random, sent=sent[own]) for own in self.shards]
        return [*messages, sent - foreign if moved else sent]

    def add_up(
        self, coder: Coder, step: int, owner_residual: Array, *messages: np.ndarray
    ) -> list[Array]:
        """Return the message of the sum of the rank's shard; and what that leaves out."""
        total = backend_of(owner_residual).copy(owner_residual[self._own])
        left = coder.zeros(self.n, self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # of a non-finite step
            for rank, message in enumerate(messages):
                self._decode(coder, message, rank, total, add=True)
            own = left[self._own]
            message = encode_coded(coder, total, self._random(step, 1), sent=own)
            own[:] = total - own
        return [message, left]

    def decode(self, coder: Coder, *messages: np.ndarray) -> list[Array]:
        """Return the sum that the messages of all owners hold, in a list."""
        total = coder.zeros(self.n, self.dtype)
        for rank, (shard, message) in enumerate(zip(self.shards, messages, strict=True)):
            self._decode(coder, message, rank, total[shard])
        return [total]
