"""Each rank adds up one region of the tensor, and only the largest sums go to all: Ok-Topk."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.backends import numpy as numpy_backend
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Aggregated, Aggregation, Aggregator
from hvd_compress.codecs import top_k
from hvd_compress.config import checked, choice, converted, numbers
from hvd_compress.meetings.averaging import summed
from hvd_compress.meetings.sparse_vectors import add_up, contains, join, largest, pick
from hvd_compress.requests import Alltoall, Gather, Request, Sum
from hvd_compress.requests.sparse import cut
from hvd_compress.schedules import Density, as_density
from hvd_compress.wire import decode_sparse, encode_sparse
from hvd_compress.wire.frame import CODECS, index_dtype


@dataclasses.dataclass(frozen=True)
class ok_topk(Aggregator, name="ok_topk"):
    """Each rank sends its k = ceil(density * n) largest elements to the owners of their regions.
    These add up, and send the sums that reach a threshold to all.

    A rank receives fewer than 6 k numbers, however many ranks there are.  An element counts as sent
    if its place is in the result.

    State, equal on all ranks: ``global_threshold``, one number, 0 before the first step.

    Options:
        density: a fraction or a schedule.
        threshold_every: steps from one exact threshold to the next; it follows the sums meanwhile.
        indices: on the wire, "packed" or "int32".
        values: on the wire, "float32", or "float16", beyond whose range they become its largest.

    Reference: Li and Hoefler, PPoPP 2022.

    >>> world = World(chain(via=ok_topk(0.25)), size=2)
    >>> world.exchange([np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])])[0].mean
    array([0., 0., 3., 0.])
    """

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))
    threshold_every: int = checked(
        numbers("a number of steps, 1 or more", lambda n: n >= 1, whole=True), 32
    )
    indices: str = choice(*CODECS, default="packed")
    values: str = choice("float32", "float16")

    is_coarse = True
    keys = ("global_threshold",)
    per_rank = False

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        return {"global_threshold": backend_of(x).zeros(1, x)}

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        xp, select = backend_of(x), top_k(self.density)
        n = xp.size(x)
        k = select.count(n, context)
        if k == n:
            return (yield from summed(x, state, context))
        own = select.select(x, k, context)
        regions = Regions(
            n, k, xp.dtype(x), context, self.threshold_every, self.indices, self.values
        )
        indices, sums, threshold, *sent = yield from regions.largest_sums(
            own, xp.take(x, own), state["global_threshold"]
        )
        mean = xp.put(xp.zeros(n, x), indices, xp.divided(sums, context.size))
        new = {"global_threshold": threshold}
        return Aggregated(mean, Sparse(*sent), xp.all_finite(sums), new)


#: how fast the threshold follows, and between which shares of k it stays
_RATE, _LOW, _HIGH = 1.008, 2 / 3, 4 / 3


@dataclasses.dataclass(frozen=True)
class Regions:
    """One rank's part in a sum by regions, each of which has as many entries, on average over the
    ranks.

    Attributes:
        n, k: elements of the tensor, and about how many of the result.
        dtype: of the values, "float32" or "float64".
        context: of the exchange: rank, size and step.
        threshold_every, indices, values: as of :class:`ok_topk`.
    """

    n: int
    k: int
    dtype: str
    context: Context
    threshold_every: int = 32
    indices: str = "packed"
    values: str = "float32"

    def largest_sums(
        self, own: Array, values: Array, threshold: Array
    ) -> Generator[Request, Any, tuple[Array, Array, Array, Array, Array]]:
        """Add up this rank's entries, ascending indices and values, with those of all others.

        The result is the k largest sums in a step that ``threshold_every`` divides, or if
        ``threshold`` (shape (1,), equal on all ranks) is not positive.  Otherwise it is those that
        reach the threshold.

        Returns:
            Indices and sums of the result and the next threshold, the same bits on all ranks; then
            indices and values of this rank's contribution.  All contributions add up to the sums:
                they
            are the rank's entries in the result, less what it rounded off as an owner.
        """
        xp, context = backend_of(values), self.context
        values = xp.round_to(values, self._wire, saturate=True)
        plain, some = (index_dtype(self.n), None), (self.dtype, None)
        one_each = [("uint8", None)] * context.size

        (mine,) = xp.on_host(self._borders, [own], [("float64", context.size - 1)], values)
        total = yield Sum(mine)
        frames = xp.on_host(self._cut, [total, own, values], one_each, values)
        received = yield Alltoall(frames, equal_sizes=False)
        frame, *lost = xp.on_host(
            self._add_up,
            [context.step, total, threshold, *received],
            [("uint8", None), ("int64", None), some],
            values,
        )
        frames = yield Gather(frame)
        indices, sums, threshold, *sent = xp.on_host(
            self._finish,
            [context.step, total, threshold, own, values, *lost, *frames],
            [plain, some, (self.dtype, 1), ("int64", None), some],
            values,
        )
        return indices, sums, threshold, *sent

    # Steps on the host.

    @property
    def _wire(self) -> str:
        return "float16" if self.values == "float16" else self.dtype

    def _borders(self, own: np.ndarray) -> list[np.ndarray]:
        """Return where all regions but the first would begin if there were this rank alone."""
        parts = np.arange(1, self.context.size)
        return [own[own.size * parts // self.context.size].astype(np.float64)]

    def bounds(self, total: np.ndarray) -> list[int]:
        """Return the bounds of the regions, given the sum over the ranks of where each would have
        the regions begin."""
        borders = total / self.context.size
        if not np.isfinite(borders).all():  # what the network made of it
            borders = np.zeros_like(borders)
        inner = np.clip(borders, 0, self.n).astype(np.int64)
        return [0, *np.maximum.accumulate(inner).tolist(), self.n]

    def _encode(self, vector: Sparse, length: int) -> np.ndarray:
        values = vector.values.astype(self._wire)
        return encode_sparse(vector.indices, values, length, self.indices, self.n)

    def _decode(self, frame: np.ndarray, length: int, sender: int) -> Sparse:
        read = functools.partial(decode_sparse, sender=f"rank {sender}", whole=self.n)
        indices, values = read(frame, length, self._wire)
        return Sparse(indices.astype(np.int64), values.astype(self.dtype))

    def _cut(self, total: np.ndarray, own: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
        """Return a frame for the owner of each region."""
        bounds = self.bounds(total)
        parts = cut(Sparse(own, values), bounds)
        return [self._encode(part, bounds[i + 1] - bounds[i]) for i, part in enumerate(parts)]

    def _is_exact(self, step: Any, threshold: np.ndarray) -> bool:
        return int(step) % self.threshold_every == 0 or not threshold[0] > 0

    def _add_up(
        self, step: Any, total: np.ndarray, threshold: np.ndarray, *frames: np.ndarray
    ) -> list[np.ndarray]:
        """Return the frame of the sums of this rank's region that are large enough, and what
        rounding takes off sums, with indices of the tensor."""
        bounds, rank = self.bounds(total), self.context.rank
        start, length = bounds[rank], bounds[rank + 1] - bounds[rank]
        parts = [self._decode(frame, length, sender) for sender, frame in enumerate(frames)]
        exact: Any = add_up(parts, length, self.dtype)
        region = Sparse(exact.indices, numpy_backend.round_to(exact.values, self._wire, True))
        rest = exact.values - region.values
        lost = pick(Sparse(exact.indices + start, rest), np.flatnonzero(rest))
        if not self._is_exact(step, threshold):
            region = pick(region, ~(np.abs(region.values) < threshold[0]))  # NaN is not less
        return [self._encode(region, length), *lost]

    def _finish(
        self,
        step: Any,
        total: np.ndarray,
        threshold: np.ndarray,
        own: np.ndarray,
        values: np.ndarray,
        *arrived: np.ndarray,
    ) -> list[np.ndarray]:
        """``arrived`` are indices and values of what rounding took off sums, and all frames."""
        lost_indices, lost_values, *frames = arrived
        bounds = self.bounds(total)
        regions = [
            self._decode(frame, bounds[i + 1] - bounds[i], i) for i, frame in enumerate(frames)
        ]
        result = join(regions, bounds)
        exact = self._is_exact(step, threshold)
        if exact:
            result = pick(result, largest(result.values, self.k))
        lost = Sparse(lost_indices, -lost_values)
        contributions = [
            pick(part, contains(result, part.indices)) for part in (Sparse(own, values), lost)
        ]
        sent: Any = add_up(contributions, self.n, self.dtype)
        return [
            result.indices.astype(index_dtype(self.n)),
            result.values,
            self._learn(np.abs(result.values), threshold, exact),
            sent.indices.astype(np.int64),
            sent.values,
        ]

    def _learn(self, magnitude: np.ndarray, old: np.ndarray, exact: bool) -> np.ndarray:
        """Return the next threshold, given the magnitudes of the result."""
        if not np.isfinite(magnitude).all():
            return old.astype(self.dtype)
        if exact or magnitude.size > 2 * self.k:
            cut = magnitude.size - self.k
            return np.array([np.partition(magnitude, cut)[cut] if cut >= 0 else 0], self.dtype)
        if magnitude.size < _LOW * self.k:
            return (old / _RATE).astype(self.dtype)
        return (old * _RATE if magnitude.size > _HIGH * self.k else old).astype(self.dtype)
