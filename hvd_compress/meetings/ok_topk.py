"""Each rank adds up one region of the tensor, and only the largest sums go to all."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.config import check_choice, converted, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.meetings.averaging import summed
from hvd_compress.meetings.regions import Regions
from hvd_compress.operators import top_k
from hvd_compress.requests import Request
from hvd_compress.schedules import Density, as_density
from hvd_compress.wire.frame import CODECS


@dataclasses.dataclass(frozen=True)
class ok_topk(Aggregator, name="ok_topk"):
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
        threshold_every: steps from one exact threshold to the next.
        indices: on the wire, "packed" or "int32".
        values: on the wire, "float32", which is as they are, or "float16".  What rounding takes off
            an element stays with its rank, and what it takes off a sum with the sum's owner; values
            beyond the range of float16 are sent as its largest.

    Reference: Li and Hoefler, PPoPP 2022.  Differs from it in: regions are balanced at every step,
    by N - 1 numbers from each rank, where the paper does so at every 64th; ranks choose exactly k
    elements, not those above a threshold of the past; all messages of a phase are sent at once.

    >>> world = World(chain(via=ok_topk(0.25)), size=2)
    >>> world.exchange([np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])])[0].mean
    array([0., 0., 3., 0.])
    >>> world.states["tensor"][0]["global_threshold"]
    array([6.])
    """

    density: Density = dataclasses.field(default=0.001, metadata=converted(as_density))
    threshold_every: int = 32
    indices: str = "packed"
    values: str = "float32"

    keys = ("global_threshold",)
    per_rank = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.threshold_every) or self.threshold_every < 1:
            raise ConfigError(
                f"threshold_every must be a number of steps, 1 or more; got "
                f"{self.threshold_every!r}"
            )
        check_choice("indices", self.indices, CODECS)
        check_choice("values", self.values, ("float32", "float16"))

    def init(self, x: Array, shape: tuple[int, ...]) -> State:
        return {"global_threshold": backend_of(x).zeros(1, x)}

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
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
