"""Momentum that all ranks share, and of which each sends its own next value (1-bit Adam)."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, State
from hvd_compress.chain import Transform
from hvd_compress.config import converted
from hvd_compress.schedules import Start, as_start, started
from hvd_compress.transforms.averaging import averaged
from hvd_compress.transforms.taking_momentum import check_momentum


@dataclasses.dataclass(frozen=True)
class averaged_momentum(Transform, name="averaged_momentum"):
    """Average gradients until ``start``, and momenta from then on.

    ::

        before   passes on  g                      u = beta u + (1 - beta) mean(g)
        after    passes on  beta u + (1 - beta) g  u = mean of what was sent

    The optimizer steps along ``mean(g)`` before, and along ``u`` after.  While nothing is lost on
    the way, both give the same ``u``.

    State: ``average`` u, equal on all ranks.

    Options:
        beta: of the moving average, in [0, 1).
        start: a number of exchanges, or ``After("epoch", ...)``.

    Reference: Tang et al., 1-bit Adam, ICML 2021.  Must stand before error feedback: behind it, the
    residual would be averaged away instead of sent.

    >>> world = World(chain(averaged_momentum(beta=0.5, start=1), via=allreduce()), size=1)
    >>> [world.exchange([np.array([4.0])])[0].direction.item() for step in range(3)]
    [4.0, 3.0, 3.5]
    """

    beta: float = 0.9
    start: Start = dataclasses.field(default=True, metadata=converted(as_start))

    keys = ("average",)
    per_rank = False
    of_gradients = True
    elementwise = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum("beta", self.beta)

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        if not started(self.start, context.step, context.epoch):
            return x, state
        return averaged(state["average"], x, self.beta), state

    def finish(self, mean: Array, state: State, context: Context) -> tuple[Array, State]:
        if not started(self.start, context.step, context.epoch):
            return mean, {"average": averaged(state["average"], mean, self.beta)}
        # The mean becomes the gradient, which its owner may clip in place.
        return mean, {"average": backend_of(mean).copy(mean)}
