"""Quantised sums: every rank adds up one shard of the tensor, and quantises what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.codecs import Codec
from hvd_compress.codecs.base import Coder
from hvd_compress.codecs.frame import coded_size, decode_coded, encode_coded
from hvd_compress.codecs.places import coded
from hvd_compress.errors import ConfigError
from hvd_compress.operators.random_k import own_generator
from hvd_compress.requests import Alltoall, Gather, Request
from hvd_compress.sharding import shards_of


@dataclasses.dataclass(frozen=True)
class alltoall(Aggregator, name="alltoall"):
    """Send each rank its shard of the tensor, coded; it adds them up, and sends the sum of its
    shard, coded again, to all ranks.

    A rank sends and receives about two coded tensors, however many ranks there are, where
    ``allgather`` would receive one from each.  What the second coding leaves out stays with the
    shard's owner, and is added there next time.

    State: ``owner_residual`` o, in units of the sum; as large as the tensor, zero outside the
    rank's own shard.  With it the law of averages reads::

        sum of sent + sum of o before = N * mean + sum of o after

    If the number of ranks changes, shards do, and what lies outside a rank's own is sent with its
    next message, so nothing is lost; a checkpoint may average ``owner_residual`` over the ranks.

    Options:
        codec: of both exchanges.

    Reference: Seide et al., Interspeech 2014; DeepSpeed's compressed allreduce.
    """

    codec: Codec

    keys = ("owner_residual",)

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ConfigError(f"alltoall takes a codec such as column_means(); got {self.codec!r}")
        if self.codec.varies:
            raise ConfigError(f"{self.codec!r} has a size that varies: allgather can send it")

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        xp = backend_of(x)
        return {"owner_residual": xp.zeros(xp.size(x), x)}

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, dtype = xp.size(x), np.dtype(xp.dtype(x))
        codec = self.codec.for_shape(context.shape)
        shards = shards_of(n, context.size, codec.unit(n))
        # Owners feed back what they leave out, whether a transform does or not.
        codec.check_feedback(max(s.stop - s.start for s in shards))
        sizes = [coded_size(codec, s.stop - s.start, dtype) for s in shards]
        work = _Work(shards, context, n, dtype)

        *frames, sent = coded(
            codec,
            work.encode,
            [context.step, x, state["owner_residual"]],
            [*(("uint8", size) for size in sizes), (dtype.name, n)],
            x,
        )
        received = yield Alltoall(frames)
        frame, owner_residual = coded(
            codec,
            work.add_up,
            [context.step, state["owner_residual"], *received],
            [("uint8", sizes[context.rank]), (dtype.name, n)],
            x,
        )
        frames = yield Gather(frame, equal_sizes=len(set(sizes)) == 1)
        (total,) = coded(codec, work.decode, frames, [(dtype.name, n)], x)
        mean = total / context.size
        return Aggregated(mean, sent, xp.all_finite(mean), {"owner_residual": owner_residual})


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a rank computes where codes are made."""

    shards: list[slice]
    context: Context
    n: int
    dtype: np.dtype

    def _random(self, step: int, turn: int) -> np.random.Generator:
        return own_generator(self.context._replace(step=step), turn)

    @property
    def _own(self) -> slice:
        return self.shards[self.context.rank]

    def _decode(
        self, coder: Coder, frame: np.ndarray, sender: int, out: Array, add: bool = False
    ) -> None:
        """Write what a frame holds to ``out``, or add it."""
        name, n = f"rank {sender}", backend_of(out).size(out)
        decode_coded(coder, frame, n, self.dtype, sender=name, out=out, add=add)

    def encode(self, coder: Coder, step: int, x: Array, owner_residual: Array) -> list[Array]:
        """Return a frame for each rank; and what the frames decode to, less what came from
        ``owner_residual``."""
        foreign = backend_of(owner_residual).copy(owner_residual)
        foreign[self._own] = 0
        moved = bool(foreign.any())  # the shards did
        x = x + foreign if moved else x
        random, sent = self._random(step, 0), coder.zeros(self.n, self.dtype)
        frames = [encode_coded(coder, x[own], random, sent=sent[own]) for own in self.shards]
        return [*frames, sent - foreign if moved else sent]

    def add_up(
        self, coder: Coder, step: int, owner_residual: Array, *frames: np.ndarray
    ) -> list[Array]:
        """Return the frame of the sum of the rank's shard; and what the frame leaves out of it."""
        total = backend_of(owner_residual).copy(owner_residual[self._own])
        left = coder.zeros(self.n, self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # of a non-finite step
            for rank, frame in enumerate(frames):
                self._decode(coder, frame, rank, total, add=True)
            own = left[self._own]
            frame = encode_coded(coder, total, self._random(step, 1), sent=own)
            own[:] = total - own
        return [frame, left]

    def decode(self, coder: Coder, *frames: np.ndarray) -> list[Array]:
        total = coder.zeros(self.n, self.dtype)
        for rank, (shard, frame) in enumerate(zip(self.shards, frames, strict=True)):
            self._decode(coder, frame, rank, total[shard])
        return [total]
