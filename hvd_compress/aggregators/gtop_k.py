"""Ranks merge what they chose in pairs, and keep the largest sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.aggregators._of_top_k import OfTopK
from hvd_compress.backend import backend_of
from hvd_compress.base import Array, Context, Request, Sparse, Swap
from hvd_compress.chain import Met
from hvd_compress.wire import decode_sparse, encode_sparse, sparse_size
from hvd_compress.wire.frame import index_dtype


@dataclasses.dataclass(frozen=True)
class gtop_k(OfTopK, name="gtop_k"):
    """Each rank chooses its k = ceil(density * n) largest elements.  Two ranks swap theirs, add
    them up, and keep the k largest sums; then two pairs, and so on, until all ranks have the same
    k.  So a message never has more than k entries, and there are log2 N of them.

    These are not the k largest of all sums: a place that is small on each rank is dropped on the
    way, however large its sum would have become.  The first rank of those that merge counts as
    not having sent what is dropped, partial sums of the others' elements included, so that its
    error feedback keeps them.

    Options:
        density: a fraction or a schedule.
        selection: "sampled" or "exact"; the same elements, found in two ways.

    Reference: Shi et al., ICDCS 2019.  Differs from it in: nothing is lost (there, every rank
    forgets what it sent of the places in the result, though a part may have been dropped in one
    pair while the place survived in another); pairs swap instead of a tree with a broadcast, which
    takes half as many rounds for the same result; any number of ranks.
    """

    def _meet_some(self, x: Array, k: int, context: Context) -> Generator[Request, Any, Met]:
        xp = backend_of(x)
        n, dtype = xp.size(x), xp.dtype(x)
        work = _Work(n, k, dtype)
        frame_type, some = ("uint8", sparse_size(k, n, dtype)), [("int64", None), (dtype, None)]

        own = self._select.select(x, k, context)
        values = xp.take(x, own)
        (frame,) = xp.on_host(work.encode, [own, values], [frame_type], x)
        dropped: list[Array] = []
        for partner, turn in turns(context.rank, context.size):
            theirs = yield Swap(frame, partner)
            if turn == "take":
                frame = theirs
            elif turn != "give":
                pair = [frame, theirs] if context.rank < partner else [theirs, frame]
                frame, *left = xp.on_host(work.merge, pair, [frame_type, *some], x)
                dropped += left if turn == "keep" else []
        indices, total = xp.on_host(work.decode, [frame], [(index_dtype(n), k), (dtype, k)], x)
        places, sent = xp.on_host(work.subtract, [own, values, *dropped], some, x)
        mean = xp.put(xp.zeros(n, x), indices, total / context.size)
        return Met(mean, Sparse(places, sent), xp.all_finite(total))


def turns(rank: int, size: int) -> list[tuple[Any, str]]:
    """Whom a rank swaps with in each round, and what it does with what it gets: "keep" and "merge"
    (both merge, and the former keeps what is dropped), "take" it as it is, or "give" and forget."""
    pairs = 1 << (size.bit_length() - 1)  # the largest power of two within size
    others = size - pairs  # each hands its choice to a rank below, and has the result from there
    rounds = range(pairs.bit_length() - 1)
    if rank >= pairs:
        below = rank - pairs
        return [(below, "give"), *((None, "give") for _ in rounds), (below, "take")]
    found: list[tuple[Any, str]] = [
        (rank ^ (1 << i), "merge" if rank % (2 << i) else "keep") for i in rounds
    ]
    if not others:
        return found
    above = rank + pairs if rank < others else None
    return [(above, "keep" if rank < others else "give"), *found, (above, "give")]


class _Work:
    """What a rank does on its host: ``k`` entries of ``n`` elements are a frame."""

    def __init__(self, n: int, k: int, dtype: str) -> None:
        self.n, self.k, self.dtype = n, k, dtype

    def encode(self, indices: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
        return [encode_sparse(indices, values, self.n)]

    def decode(self, frame: np.ndarray) -> list[np.ndarray]:
        indices, values = decode_sparse(frame, self.n, self.dtype, self.k, sender="a partner")
        return [indices, values]

    def merge(self, first: np.ndarray, second: np.ndarray) -> list[np.ndarray]:
        """The frame of the k largest sums, and places and sums of the others."""
        places, sums = _added(self.decode(first), self.decode(second))
        magnitude = np.where(np.isfinite(sums), np.abs(sums), np.inf)
        order = np.argsort(-magnitude, kind="stable")
        kept, left = np.sort(order[: self.k]), np.sort(order[self.k :])
        return [encode_sparse(places[kept], sums[kept], self.n), places[left], sums[left]]

    def subtract(self, places: np.ndarray, values: np.ndarray, *left: np.ndarray) -> list[Any]:
        """``values`` at ``places``, less pairs of places and values."""
        total: list[np.ndarray] = [places.astype(np.int64), values]
        for at, what in zip(left[::2], left[1::2], strict=True):
            total = _added(total, [at, -what])
        return total


def _added(one: list[np.ndarray], other: list[np.ndarray]) -> list[np.ndarray]:
    places = np.union1d(one[0], other[0]).astype(np.int64)
    sums = np.zeros(places.size, one[1].dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        for at, what in (one, other):
            sums[np.searchsorted(places, at)] += what
    return [places, sums]
