"""Every rank sends elements that it draws for itself, and no indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Gather, Request, Sparse, State, Sum
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.config import check_choice
from hvd_compress.operators.classes import Classes
from hvd_compress.operators.random_k import own_generator, random_k
from hvd_compress.wire.frame import decode_dense, encode_dense, padded


@dataclasses.dataclass(frozen=True)
class gather_drawn(Aggregator, name="gather_drawn"):
    """Gather k elements of every rank, which it draws with a seed of its own.  That seed follows
    from what all ranks know (the common seed, the step, the tensor and the rank), so values are
    sent alone, and the receivers draw the indices again.

    Ranks that draw for themselves err independently: the variance of the average of N is an N-th of
    one rank's, where ``allreduce(select=random_k())``, with the same indices on all ranks, has the
    variance of one.  In exchange every rank receives k values from each other.  Where that is more
    than two dense arrays, the same elements are sent in a dense sum.

    Options:
        select: how many elements.
        unbiased: scale them by n/k, so that their expectation is the gradient.  Not to be combined
            with error feedback, which needs the unscaled elements.
        wire: dtype on the wire: "float16" (values beyond its range are sent as its largest, and
            error feedback keeps the rest) or ``None``, that of the array.

    Reference: Beznosikov, Horvath, Richtarik, Safaryan, JMLR 2023.
    """

    select: random_k
    unbiased: bool = False
    wire: str | None = None

    def __post_init__(self) -> None:
        check_choice("wire", self.wire, (None, "float16"))
        check_choice("unbiased", self.unbiased, (True, False))
        if not isinstance(self.select, random_k):
            raise TypeError(
                f"gather_drawn({self.select!r}): others can draw again only what random_k() drew; "
                "write allgather(...) for operators that look at the gradient"
            )

    def classes(self, d: int, context: Context | None = None) -> Classes:
        """Return the constants of what one rank sends: those of ``allreduce`` with the same
        operator."""
        if self.wire:
            return super().classes(d, context)
        return (self.select.scaled_classes if self.unbiased else self.select.classes)(d, context)

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp = backend_of(x)
        n, k = xp.size(x), self.select.count(xp.size(x), context)
        own, wire = np.dtype(xp.dtype(x)), np.dtype(self.wire or xp.dtype(x))
        if k == n:
            total = yield Sum(x)
            mean = total / context.size
            return Aggregated(mean, x, xp.all_finite(mean))

        def places(step: Any, rank: int) -> np.ndarray:
            its = context._replace(step=int(step), rank=rank)
            return self.select.draw(n, k, own_generator(its))

        (indices,) = xp.on_host(
            lambda step: [places(step, context.rank)], [context.step], [("int64", k)], x
        )
        values = xp.take(x, indices)
        if self.unbiased:
            values = values * (n / k)
        values = xp.round_to(values, wire.name, saturate=True)
        sent = Sparse(indices, values)
        if context.size * k * wire.itemsize > 2 * n * own.itemsize:
            total = yield Sum(xp.put(xp.zeros(n, x), indices, values))
            mean = total / context.size
            return Aggregated(mean, sent, xp.all_finite(mean))

        def add_up(step: Any, *frames: np.ndarray) -> list[np.ndarray]:
            total = np.zeros(n, own)
            for rank, frame in enumerate(frames):
                found = decode_dense(frame, k, wire.name, sender=f"rank {rank}")
                total[places(step, rank)] += found
            return [total]

        (frame,) = xp.on_host(
            lambda values: [encode_dense(values)],
            [xp.cast(values, wire.name)],
            [("uint8", padded(k * wire.itemsize))],
            x,
        )
        frames = yield Gather(frame, equal_sizes=True)
        (total,) = xp.on_host(add_up, [context.step, *frames], [(own.name, n)], x)
        mean = total / context.size
        return Aggregated(mean, sent, xp.all_finite(mean))
