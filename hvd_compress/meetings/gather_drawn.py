"""Every rank sends elements that it draws for itself, and no indices."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Encoded, State
from hvd_compress.chain import Aggregated, Aggregator
from hvd_compress.config import check_choice
from hvd_compress.meetings.averaging import gathered, summed, summed_densely
from hvd_compress.meetings.drawn import drawn
from hvd_compress.meetings.whole import whole
from hvd_compress.operators.classes import Classes
from hvd_compress.operators.random_k import random_k
from hvd_compress.requests import Request


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
        select: how many elements, a ``random_k``.
        unbiased: scale them by n/k, so that their expectation is the gradient.  Not to be combined
            with error feedback, which needs the unscaled elements.
        wire: dtype on the wire: "float16" (values beyond its range are sent as its largest, and
            error feedback keeps the rest) or ``None``, that of the array.

    Reference: Beznosikov, Horvath, Richtarik, Safaryan, JMLR 2023.

    Two elements of each rank, which has places of its own:

    >>> world = World(chain(via=gather_drawn(random_k(0.25))), size=2)
    >>> world.exchange([np.full(8, 2.0), np.full(8, 4.0)])[0].mean
    array([0., 2., 2., 0., 1., 0., 1., 0.])
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

    def coding(self, n: int, context: Context) -> Coding:
        if self.select.count(n, context) == n:
            return whole()
        return drawn(self.select, unbiased=self.unbiased, wire=self.wire)

    def aggregate(
        self, x: Array, state: State, context: Context
    ) -> Generator[Request, Any, Aggregated]:
        xp, coding = backend_of(x), self.coding(backend_of(x).size(x), context)
        if not isinstance(coding, drawn):
            return (yield from summed(x, state, context))
        own = coding.pick(x, context)
        k, itemsize = xp.size(own.values), np.dtype(xp.dtype(x)).itemsize
        sent = k * np.dtype(self.wire or xp.dtype(x)).itemsize
        if context.size * sent > 2 * xp.size(x) * itemsize:
            return (yield from summed_densely(own, x, state, context))
        encoded = Encoded(coding.pack(own.values), own, state)
        return (yield from gathered(coding, encoded, x, context))
