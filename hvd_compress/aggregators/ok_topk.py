"""Each rank adds up one region of the tensor, and only the largest sums go to all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.aggregators._of_top_k import OfTopK
from hvd_compress.aggregators.sparse_vectors import add_up, contains, cut, join, largest, pick
from hvd_compress.backends import backend_of
from hvd_compress.base import Alltoall, Array, Context, Gather, Request, Sparse, State, Sum
from hvd_compress.chain import Aggregated
from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.wire import decode_sparse, encode_sparse
from hvd_compress.wire.frame import index_dtype

#: how fast the threshold follows, and between which shares of k it stays
_RATE, _LOW, _HIGH = 1.008, 2 / 3, 4 / 3


@dataclasses.dataclass(frozen=True)
class ok_topk(OfTopK, name="ok_topk"):
    """Each rank chooses its k = ceil(density * n) largest elements, and sends each region of the
    tensor to the region's owner.  Owners add up, and send the sums that reach a threshold to all:
    about k of them.  So a rank receives fewer than 6 k (N - 1) / N numbers, however many ranks
    there are, where :class:`allgather` delivers 2 k (N - 1).

    Regions are such that each has as many entries, on average over the ranks.  An element counts as
    sent if its place is in the result, so error feedback keeps all others.

    State, equal on all ranks: ``global_threshold``, one number, 0 before the first step.  Every
    ``threshold_every`` steps owners send all their sums, everyone takes the k largest, and the
    threshold becomes the smallest of these; in between it follows the number of sums that reach it,
    by 0.8 % a step, and is exact again where these are more than 2 k.

    Options:
        density: a fraction or a schedule.
        selection: "sampled" or "exact"; the same elements, found in two ways.
        threshold_every: steps from one exact threshold to the next.
        indices: on the wire, "packed" or "int32".

    Reference: Li and Hoefler, PPoPP 2022.  Differs from it in: regions are balanced at every step,
    by N - 1 numbers from each rank, where the paper does so at every 64th; ranks choose exactly k
    elements, not those above a threshold of the past; all messages of a phase are sent at once.
    """

    threshold_every: int = 32
    indices: str = "packed"

    keys = ("global_threshold",)
    per_rank = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.threshold_every) or self.threshold_every < 1:
            raise ConfigError(
                f"threshold_every must be a number of steps, 1 or more; got "
                f"{self.threshold_every!r}"
            )

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        return {"global_threshold": backend_of(x).zeros(1, x)}

    def _aggregate_top_k(
        self, x: Array, k: int, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, size = xp.size(x), context.size
        own = self._select.select(x, k, context)
        values, dtype = xp.take(x, own), xp.dtype(x)
        work = _Work(self, n, k, dtype, context)

        (mine,) = xp.on_host(work.borders, [own], [("float64", size - 1)], x)
        total = yield Sum(mine)
        frames = xp.on_host(work.cut, [total, own, values], [("uint8", None)] * size, x)
        received = yield Alltoall(frames, equal_sizes=False)
        (frame,) = xp.on_host(
            work.add_up,
            [context.step, total, state["global_threshold"], *received],
            [("uint8", None)],
            x,
        )
        frames = yield Gather(frame)
        indices, sums, threshold, kept, sent = xp.on_host(
            work.finish,
            [context.step, total, state["global_threshold"], own, values, *frames],
            [(index_dtype(n), None), (dtype, None), (dtype, 1), ("int64", None), (dtype, None)],
            x,
        )
        mean = xp.put(xp.zeros(n, x), indices, sums / size)
        new = {"global_threshold": threshold}
        return Aggregated(mean, Sparse(kept, sent), xp.all_finite(sums), new)


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a rank does on its host."""

    options: ok_topk
    n: int
    k: int
    dtype: str
    context: Context

    def borders(self, own: np.ndarray) -> list[np.ndarray]:
        """Return where all regions but the first would begin if there were this rank alone."""
        parts = np.arange(1, self.context.size)
        return [own[own.size * parts // self.context.size].astype(np.float64)]

    def _bounds(self, total: np.ndarray) -> list[int]:
        borders = total / self.context.size
        if not np.isfinite(borders).all():  # what the network made of it
            borders = np.zeros_like(borders)
        inner = np.clip(borders, 0, self.n).astype(np.int64)
        return [0, *np.maximum.accumulate(inner).tolist(), self.n]

    def _encode(self, vector: Sparse, length: int) -> np.ndarray:
        codec = self.options.indices
        return encode_sparse(vector.indices, vector.values, length, codec, self.n)

    def _decode(self, frame: np.ndarray, length: int, sender: int) -> Sparse:
        read = functools.partial(decode_sparse, sender=f"rank {sender}", whole=self.n)
        indices, values = read(frame, length, self.dtype)
        return Sparse(indices.astype(np.int64), values.astype(self.dtype))

    def cut(self, total: np.ndarray, own: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
        """Return a frame for the owner of each region."""
        bounds = self._bounds(total)
        parts = cut(Sparse(own, values), bounds)
        return [self._encode(part, bounds[i + 1] - bounds[i]) for i, part in enumerate(parts)]

    def _is_exact(self, step: Any, threshold: np.ndarray) -> bool:
        return int(step) % self.options.threshold_every == 0 or not threshold[0] > 0

    def add_up(
        self, step: Any, total: np.ndarray, threshold: np.ndarray, *frames: np.ndarray
    ) -> list[np.ndarray]:
        """Return the frame of the sums of this rank's region that are large enough."""
        bounds, rank = self._bounds(total), self.context.rank
        length = bounds[rank + 1] - bounds[rank]
        parts = [self._decode(frame, length, sender) for sender, frame in enumerate(frames)]
        region: Any = add_up(parts, length, self.dtype)
        if not self._is_exact(step, threshold):
            region = pick(region, ~(np.abs(region.values) < threshold[0]))  # NaN is not less
        return [self._encode(region, length)]

    def finish(
        self,
        step: Any,
        total: np.ndarray,
        threshold: np.ndarray,
        own: np.ndarray,
        values: np.ndarray,
        *frames: np.ndarray,
    ) -> list[np.ndarray]:
        """Return places and sums of the result, the next threshold, and which entries of this rank
        are in it."""
        bounds = self._bounds(total)
        regions = [
            self._decode(frame, bounds[i + 1] - bounds[i], i) for i, frame in enumerate(frames)
        ]
        result = join(regions, bounds)
        exact = self._is_exact(step, threshold)
        if exact:
            result = pick(result, largest(result.values, self.k))
        arrived = contains(result, own)
        return [
            result.indices.astype(index_dtype(self.n)),
            result.values,
            self._learn(np.abs(result.values), threshold, exact),
            own[arrived].astype(np.int64),
            values[arrived],
        ]

    def _learn(self, magnitude: np.ndarray, old: np.ndarray, exact: bool) -> np.ndarray:
        if not np.isfinite(magnitude).all():
            return old.astype(self.dtype)
        if exact or magnitude.size > 2 * self.k:
            cut = magnitude.size - self.k
            return np.array([np.partition(magnitude, cut)[cut] if cut >= 0 else 0], self.dtype)
        if magnitude.size < _LOW * self.k:
            return (old / _RATE).astype(self.dtype)
        return (old * _RATE if magnitude.size > _HIGH * self.k else old).astype(self.dtype)
