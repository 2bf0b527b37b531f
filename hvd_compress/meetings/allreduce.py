"""Linear methods: one sum over the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Form, State
from hvd_compress.chain import Aggregated, Aggregation, Aggregator, Transform
from hvd_compress.codecs import random_k
from hvd_compress.codecs.selector import IDENTITY, Classes
from hvd_compress.config import choice
from hvd_compress.fused import FusedDrawn, FusedSum
from hvd_compress.meetings.averaging import summed, whole
from hvd_compress.meetings.drawn import drawn
from hvd_compress.requests import Sum
from hvd_compress.requests.algorithms import SUMS
from hvd_compress.transforms import momentum_after_averaging


@dataclasses.dataclass(frozen=True)
class allreduce(Aggregator, name="allreduce"):
    """Sum everything, or the elements that ``select`` picks on every rank alike.

    Options:
        wire: dtype on the wire: "float16", "bfloat16" or "gradient" (the gradient's own).
            ``None``: that of the sum, in which half precisions are widened to float32.
        select: ``random_k``, whose choice does not depend on the gradient.
        unbiased: scale what was selected by n/k, so that its expectation is the gradient; not
            with error feedback.
        algorithm: over MPI "direct", "ring", "halving_doubling", "hierarchical", which adds up
            inside of nodes first, or "auto", the fastest when measured on the communicator.
            ``None`` takes the engine's own.

    Raises:
        TypeError: ``select`` looks at the gradient, so ranks would sum different coordinates.

    >>> world = World(chain(via=allreduce(select=random_k(0.5))), size=2)
    >>> outcome = world.exchange([np.array([4.0, 1.0, 0.0, 2.0]), np.array([1.0, 0.0, 6.0, 3.0])])
    >>> outcome[0].mean, outcome[0].sent.indices
    (array([0. , 0. , 3. , 2.5]), array([2, 3]))
    """

    wire: str | None = choice(None, "gradient", "float16", "bfloat16")
    select: random_k | None = None
    unbiased: bool = choice(True, False, default=False)
    algorithm: str | None = choice(*SUMS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.select is not None and not isinstance(self.select, random_k):
            raise TypeError(
                f"allreduce({self.select!r}) would sum different coordinates of different ranks; "
                "write allgather(...) for operators that look at the gradient"
            )

    def classes(self, d: int, context: Context | None = None) -> Classes:
        if self.wire in ("float16", "bfloat16"):
            return super().classes(d, context)
        if self.select is None:
            return IDENTITY
        return (self.select.scaled_classes if self.unbiased else self.select.classes)(d, context)

    def fused(self, transforms: Sequence[Transform], context: Context) -> Form | None:
        # Of half precisions, which take another way, only the aggregator knows what is sent.
        wire = None if self.wire == "gradient" else self.wire
        if self.select is not None:
            how = self.select, self.unbiased, wire, self.algorithm
            return FusedDrawn.of(transforms, context, *how)
        before = list(transforms)
        momentum, nesterov = None, False
        if before and isinstance(last := before[-1], momentum_after_averaging):
            momentum = last
            del before[-1]
            _, nesterov = momentum.in_use(context)
        if any(t.finishes or t.keys for t in before):
            return None
        return FusedSum(tuple(before), momentum, nesterov, wire, self.algorithm)

    def _wire(self, context: Context) -> str | None:
        if self.wire != "gradient":
            return self.wire
        return context.dtype if context.dtype in ("float16", "bfloat16") else None

    def aggregate(self, x: Array, state: State, context: Context) -> Aggregation:
        wire = self._wire(context)
        if self.select is None:
            return (yield from summed(x, state, context, wire, self.algorithm))
        xp = backend_of(x)
        own = self._drawn(self.select, None).pick(x, context)
        total = yield Sum(own.values, wire, self.algorithm)
        values_mean = xp.divided(total, context.size)
        mean = xp.put(xp.zeros(xp.size(x), x), own.indices, values_mean)
        sent = own._replace(values=xp.round_to(own.values, wire))
        return Aggregated(mean, sent, xp.all_finite(values_mean), state)

    def coding(self, n: int, context: Context) -> Coding:
        wire = self._wire(context)
        return whole(wire) if self.select is None else self._drawn(self.select, wire)

    def _drawn(self, select: random_k, wire: str | None) -> drawn:
        return drawn(select, alike=True, unbiased=self.unbiased, wire=wire)
