"""Ranks merge what they chose in pairs, and keep the largest sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

from hvd_compress.aggregators._of_top_k import OfTopK
from hvd_compress.aggregators.merging import Merging
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Aggregated
from hvd_compress.config import check_choice
from hvd_compress.requests import Request
from hvd_compress.wire.frame import CODECS


@dataclasses.dataclass(frozen=True)
class gtop_k(OfTopK, name="gtop_k"):
    """Each rank chooses its k = ceil(density * n) largest elements.  Two ranks exchange theirs, add
    them up, and keep the k largest sums; then two pairs, and so on, until all ranks have the same
    k.  So a message never has more than k entries, and there are log2 N of them; two more where N
    is no power of two, the last of which has a bit for each entry besides.

    These are not the k largest of all sums: a place that is small on each rank is dropped on the
    way, however large its sum would have become.  An element counts as sent if its place survived
    every merge that it went through, so error feedback keeps what was dropped, and only on the
    rank whose it is.

    Options:
        density: a fraction or a schedule.
        selection: "sampled" or "exact"; the same elements, found in two ways.
        indices: on the wire, "int32" or "packed", about log2(n / k) + 1.5 bits each, in messages
            whose sizes have to be exchanged.

    Reference: Shi et al., ICDCS 2019.  Differs from it in: nothing is lost (there, every rank
    forgets what it sent of the places in the result, though its part may have been dropped in one
    pair while the place survived in another); pairs exchange instead of a tree with a broadcast,
    which takes half as many rounds for the same result; any number of ranks.

    >>> world = World(chain(error_feedback(), via=gtop_k(0.25)), size=2)
    >>> world.exchange([np.array([4.0, 3.0, 0.0, 0.0]), np.array([1.0, 0.0, 6.0, 3.0])])[0].mean
    array([0., 0., 3., 0.])
    >>> world.states["tensor"][0]["residual"]
    array([4., 3., 0., 0.])
    """

    indices: str = "packed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("indices", self.indices, CODECS)

    def _aggregate_top_k(
        self, x: Array, k: int, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n = xp.size(x)
        own = self._select.select(x, k, context)
        merging = Merging(
            context.rank, context.size, n, k, xp.dtype(x), always_k=True, codec=self.indices
        )
        indices, total, *sent = yield from merging.in_pairs(own, xp.take(x, own))
        mean = xp.put(xp.zeros(n, x), indices, xp.divided(total, context.size))
        return Aggregated(mean, Sparse(*sent), xp.all_finite(total))
