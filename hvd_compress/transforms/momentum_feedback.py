"""Momentum that loses what was sent of it (Peng et al., 2024)."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.transforms.feedback import Feedback, unsent
from hvd_compress.transforms.taking_momentum import check_momentum


@dataclasses.dataclass(frozen=True)
class momentum_feedback(Feedback, name="momentum_feedback"):
    """``x = decay momentum + gradient``; after the exchange ``momentum = x - sent``.

    Momentum and error feedback in one array: what is not sent is the momentum of later steps.

    State: ``momentum``, as large as the gradient; differs between ranks.

    Options:
        decay: what is left of momentum after a step, in [0, 1).

    Reference: Peng, Quesnelle, Kingma, DeMo, arXiv 2411.19870.  Differs from it in: gradients are
    added up, where it adds up learning rate * gradient.  At a constant rate this is the same, but
    for the unit; see :class:`error_feedback` for why.

    >>> world = World(chain(momentum_feedback(0.5), via=allgather(top_k(0.5))), size=1)
    >>> [world.exchange([np.array([4.0, 3.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0], [0.0, 4.5]]
    """

    decay: float = 0.999

    keys = ("momentum",)

    def __post_init__(self) -> None:
        check_momentum("decay", self.decay)

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        return super().update(x, {"momentum": self.decay * state["momentum"]}, context)

    def remaining(self, x: Array, sent: Array | Sparse, old: Array) -> Array:
        return unsent(x, sent)
