"""Quantised sums: every rank adds up one shard of the tensor, and quantises what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, State
from hvd_compress.chain import Aggregated, Aggregation, Aggregator, Transform
from hvd_compress.codecs import Codec
from hvd_compress.codecs.at_random import own_generator
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_coded
from hvd_compress.errors import ConfigError
from hvd_compress.fused import FusedCodes
from hvd_compress.meetings.codes import codes
from hvd_compress.requests import Alltoall, Gather
from hvd_compress.sharding import shards_of


@dataclasses.dataclass(frozen=True)
class alltoall(Aggregator, name="alltoall"):
    """Send each rank its shard of the tensor, coded; it adds them up, and sends the sum of its
    shard, coded again, to all ranks.

    A rank sends and receives about two coded tensors, however many ranks there are.  The error of
    the second coding stays with the shard's owner, and is added there next time.

    State: ``owner_residual`` o, in units of the sum; as large as the tensor, zero outside the
    rank's own shard.  After the number of ranks has changed, the part outside is sent next::

        sum of sent + sum of o before = N * mean + sum of o after

    Options:
        codec: of both exchanges; one whose size does not vary with the values.

    Reference: Seide et al., Interspeech 2014; DeepSpeed's compressed allreduce.

    >>> world = World(chain(via=alltoall(linear(3))), size=2)
    >>> world.exchange([np.array([3.0, 1.2, 0.0, 2.0]), np.array([3.0, 0.0, 6.0, 3.0])])[0].mean
    array([3.5, 0. , 3.5, 3.5])
    >>> [state["owner_residual"].round(1).tolist() for state in world.states["tensor"]]
    [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, -1.0, -1.0]]
    """

    codec: Codec

    keys = ("owner_residual",)

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ConfigError(f"alltoall takes a codec such as column_means(); got {self.codec!r}")

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        xp = backend_of(x)
        return {"owner_residual": xp.zeros(xp.size(x), x)}

    def coding(self, n: int, context: Context) -> Coding:
        return codes(self.codec.for_shape(context.shape))

    def fused(self, transforms: Sequence[Transform], context: Context) -> FusedCodes | None:
        return FusedCodes.of(transforms, context, self.codec, False)

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        xp = backend_of(x)
        n, dtype = xp.size(x), np.dtype(xp.dtype(x))
        codec = self.codec.for_shape(context.shape)
        shards = _Shards.of(codec, n, dtype, context)
        sizes = shards.sizes
        # Owners feed back what they leave out, whether a transform does or not.
        codec.check_feedback(max(shard.stop - shard.start for shard in shards.shards))

        *frames, sent = xp.on_host(
            shards.encode,
            [context.step, x, state["owner_residual"]],
            [*(("uint8", size) for size in sizes), (dtype.name, n)],
            x,
        )
        received = yield Alltoall(frames)
        frame, owner_residual = xp.on_host(
            shards.add_up,
            [context.step, state["owner_residual"], *received],
            [("uint8", sizes[context.rank]), (dtype.name, n)],
            x,
        )
        frames = yield Gather(frame, equal_sizes=len(set(sizes)) == 1)
        (total,) = xp.on_host(shards.decode, frames, [(dtype.name, n)], x)
        mean = xp.divided(total, context.size)
        return Aggregated(mean, sent, xp.all_finite(mean), {"owner_residual": owner_residual})


@dataclasses.dataclass(frozen=True)
class _Shards:
    """The part of a rank in a sum that is coded twice.

    Attributes:
        codec: of the tensor.
        shards: the elements of each rank.
        context: the rank, and what its random numbers follow from.
        n, dtype: of the flat array.
    """

    codec: Codec
    shards: list[slice]
    context: Context
    n: int
    dtype: np.dtype

    @classmethod
    def of(cls, codec: Codec, n: int, dtype: np.dtype, context: Context) -> _Shards:
        return cls(codec, [*shards_of(n, context.size, codec.unit(n))], context, n, dtype)

    @property
    def sizes(self) -> list[int]:
        return [coded_size(self.codec, s.stop - s.start, self.dtype) for s in self.shards]

    def _random(self, step: int, turn: int) -> np.random.Generator:
        return own_generator(self.context._replace(step=step), turn)

    @property
    def _own(self) -> slice:
        return self.shards[self.context.rank]

    def _decode(self, message: np.ndarray, sender: int, out: np.ndarray, add: bool = False) -> None:
        """Write what a message holds to ``out``, or add it."""
        name = f"rank {sender}"
        decode_coded(self.codec, message, out.size, self.dtype, sender=name, out=out, add=add)

    def encode(self, step: int, x: np.ndarray, owner_residual: np.ndarray) -> list[np.ndarray]:
        """Return a message for each rank; and what they hold, less what came from
        ``owner_residual``."""
        foreign = owner_residual.copy()
        foreign[self._own] = 0
        moved = bool(foreign.any())  # the shards did
        x = x + foreign if moved else x
        random, sent = self._random(step, 0), np.zeros(self.n, self.dtype)
        messages = [encode_coded(self.codec, x[own], random, sent=sent[own]) for own in self.shards]
        return [*messages, sent - foreign if moved else sent]

    def add_up(
        self, step: int, owner_residual: np.ndarray, *messages: np.ndarray
    ) -> list[np.ndarray]:
        """Return the message of the sum of the rank's shard; and what that leaves out."""
        total, left = owner_residual[self._own].copy(), np.zeros(self.n, self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # of a non-finite step
            for rank, message in enumerate(messages):
                self._decode(message, rank, total, add=True)
            own = left[self._own]
            message = encode_coded(self.codec, total, self._random(step, 1), sent=own)
            own[:] = total - own
        return [message, left]

    def decode(self, *messages: np.ndarray) -> list[np.ndarray]:
        """Return the sum that the messages of all owners hold, in a list."""
        total = np.zeros(self.n, self.dtype)
        for rank, (shard, message) in enumerate(zip(self.shards, messages, strict=True)):
            self._decode(message, rank, total[shard])
        return [total]
