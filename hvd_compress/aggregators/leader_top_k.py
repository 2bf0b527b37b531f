"""One rank after the other says which elements all ranks send."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backend import backend_of
from hvd_compress.base import Array, Context, Gather, Request, Sparse, State, Sum
from hvd_compress.chain import Aggregator, Met
from hvd_compress.codecs import Codec
from hvd_compress.errors import PayloadError
from hvd_compress.operators import top_k
from hvd_compress.operators.random_k import own_generator
from hvd_compress.schedules import Density
from hvd_compress.wire.coded import decode_coded, encode_coded
from hvd_compress.wire.frame import index_dtype


@dataclasses.dataclass(frozen=True)
class leader_top_k(Aggregator, name="leader_top_k"):
    """The leader, rank ``step mod N``, sends the indices of the k = ceil(density * n) elements that
    are largest on it to all; the values of all ranks there are summed.

    Only the leader's message has a content, so what a rank sends and receives does not grow with
    the number of ranks.

    Options:
        density: a fraction or a schedule.
        selection: "sampled" or "exact"; the same elements, found in two ways.

    Reference: Chen et al., ScaleCom, NeurIPS 2020, where it is called CLT-k.
    """

    density: Density = 0.001
    selection: str = "sampled"

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", self._select.density)  # checks the options

    @property
    def _select(self) -> top_k:
        return top_k(self.density, self.selection)

    @property
    def needs_epoch(self) -> bool:
        return self._select.needs_epoch

    def meet(self, x: Array, state: State, context: Context) -> Generator[Request, Any, Met]:
        xp = backend_of(x)
        n, k = xp.size(x), self._select.count(xp.size(x), context)
        if k == n:
            total = yield Sum(x)
            mean = total / context.size
            return Met(mean, x, xp.all_finite(mean))

        def encode(step: Any, own: np.ndarray) -> list[np.ndarray]:
            if int(step) % context.size != context.rank:
                return [np.zeros(0, np.uint8)]
            code = np.zeros(k, np.float32)
            random = own_generator(context._replace(step=int(step)))
            return [encode_coded(_nothing(), code, random, own, n)]

        def decode(step: Any, *frames: np.ndarray) -> list[np.ndarray]:
            leader = int(step) % context.size
            for rank, frame in enumerate(frames):
                if rank != leader and frame.size:
                    raise PayloadError(
                        f"bad payload from rank {rank}: it takes itself for the leader, but at "
                        f"step {step} that is rank {leader}; the ranks' steps must be the same"
                    )
            frame, dtype = frames[leader], np.dtype(np.float32)
            found, _ = decode_coded(_nothing(), frame, k, dtype, n, sender=f"rank {leader}")
            assert found is not None
            return [found]

        own = xp.choose(
            context.step % context.size == context.rank,
            lambda: self._select.select(x, k, context),
            lambda: xp.cast(x[:0], "int64"),
        )
        (frame,) = xp.on_host(encode, [context.step, own], [("uint8", None)], x)
        frames = yield Gather(frame)
        (indices,) = xp.on_host(decode, [context.step, *frames], [(index_dtype(n), k)], x)
        values = xp.take(x, indices)
        total = yield Sum(values)
        values_mean = total / context.size
        mean = xp.put(xp.zeros(n, x), indices, values_mean)
        return Met(mean, Sparse(indices, values), xp.all_finite(values_mean))


class _nothing(Codec):
    """For a frame of indices alone."""

    def __repr__(self) -> str:
        return "indices"

    def size(self, n: int, dtype: np.dtype) -> int:
        return 0

    def encode(self, x: np.ndarray, random: np.random.Generator) -> np.ndarray:
        return np.zeros(0, np.uint8)

    def decode(self, code: np.ndarray, n: int, dtype: np.dtype) -> np.ndarray:
        return np.zeros(n, dtype)
