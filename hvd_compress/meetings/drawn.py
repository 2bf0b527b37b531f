"""Some elements at places that follow from the seed, and so without indices."""

from __future__ import annotations

import dataclasses

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Encoded, Sparse, State
from hvd_compress.chain import Aggregation, Aggregator
from hvd_compress.codecs.at_random import own_generator, random_k, shared_generator
from hvd_compress.codecs.selector import Classes
from hvd_compress.config import choice
from hvd_compress.meetings.averaging import Added, gathered, packed, summed, summed_densely, whole
from hvd_compress.wire.frame import decode_dense


@dataclasses.dataclass(frozen=True)
class drawn(Added, name="drawn"):
    """Send the values at places that all ranks can draw: they follow from the common seed, the
    step, the tensor and, unless ``alike``, the rank.

    Options:
        select: how many elements.
        alike: the places are the same on all ranks, so that the values can be summed.
        unbiased: scale the values by n/k, so that their expectation is the array.
        wire: dtype on the wire: "float16", "bfloat16", or ``None``, the values' own.  Beyond the
            range of float16 values become its largest, or if ``alike`` Inf, as their sum might.

    >>> coding, x = drawn(random_k(0.5)), np.array([4.0, 1.0, 0.0, -2.0])
    >>> encoded = coding.encode(x, {}, Context(rank=1, step=3))
    >>> encoded.sent.indices, coding.decode([encoded.message], x, Context(step=3), ranks=[1]).total
    (array([0, 1]), array([4., 1., 0., 0.]))
    """

    select: random_k
    alike: bool = choice(True, False, default=False)
    unbiased: bool = choice(True, False, default=False)
    wire: str | None = choice(None, "float16", "bfloat16")

    def pick(self, x: Array, context: Context) -> Sparse:
        """Return the elements that are drawn, scaled and rounded as they are sent."""
        xp = backend_of(x)
        n = xp.size(x)
        k = self.select.count(n, context)
        if self.alike:
            indices = self.select.select(x, k, context)
        else:
            (indices,) = xp.on_host(
                lambda step: [self.places(n, context._replace(step=step))],
                [context.step],
                [("int64", k)],
                x,
            )
        values = xp.take(x, indices)
        if self.unbiased and k:
            values = values * (n / k)
        return Sparse(indices, xp.round_to(values, self.wire, saturate=not self.alike))

    def places(self, n: int, context: Context) -> np.ndarray:
        """Return which of ``n`` elements the context's rank sends, ascending (int64)."""
        random = shared_generator(context) if self.alike else own_generator(context)
        return self.select.draw(n, self.select.count(n, context), random)

    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        picked = self.pick(x, context)
        return Encoded(packed(picked.values, self.wire), picked, state)

    def add_to(self, total: np.ndarray, message: np.ndarray, context: Context) -> None:
        places, wire = self.places(total.size, context), self.wire or total.dtype.name
        total[places] += decode_dense(message, places.size, wire, sender=f"rank {context.rank}")


@dataclasses.dataclass(frozen=True)
class gather_drawn(Aggregator, name="gather_drawn"):
    """Gather k elements of every rank, which it draws with a seed of its own that all ranks know.

    Ranks err independently: the variance of the average of N is an N-th of one rank's, where
    ``allreduce(select=random_k())`` has the variance of one.  Every rank receives k values from
    each other, or where that is more, two dense arrays.

    Options:
        select: how many elements, a ``random_k``; else ``TypeError``.
        unbiased: scale them by n/k, so that their expectation is the gradient; not with error
            feedback.
        wire: dtype on the wire, "float16" (values beyond its range become its largest) or ``None``.

    Reference: Beznosikov, Horvath, Richtarik, Safaryan, JMLR 2023.

    >>> world = World(chain(via=gather_drawn(random_k(0.25))), size=2)
    >>> world.exchange([np.full(8, 2.0), np.full(8, 4.0)])[0].mean
    array([0., 2., 2., 0., 1., 0., 1., 0.])
    """

    select: random_k
    unbiased: bool = choice(True, False, default=False)
    wire: str | None = choice(None, "float16")

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        xp, coding = backend_of(x), self.coding(backend_of(x).size(x), context)
        if not isinstance(coding, drawn):
            return (yield from summed(x, state, context))
        own = coding.pick(x, context)
        k, itemsize = xp.size(own.values), np.dtype(xp.dtype(x)).itemsize
        sent = k * np.dtype(self.wire or xp.dtype(x)).itemsize
        if context.size * sent > 2 * xp.size(x) * itemsize:
            return (yield from summed_densely(own, x, state, context))
        encoded = Encoded(packed(own.values, self.wire), own, state)
        return (yield from gathered(coding, encoded, x, context))
