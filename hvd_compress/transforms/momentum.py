"""Momentum inside the exchange: before it (per rank) or after it (on the average)."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.config import check_choice
from hvd_compress.transforms.taking_momentum import TakesMomentum


def heavy_ball(gradient: Array, velocity: Array, m: float, nesterov: bool) -> tuple[Array, Array]:
    """Return the direction and the new velocity, for the momentum ``m``; Lin et al. write Nesterov
    with the product m * velocity."""
    if nesterov:
        velocity = velocity + gradient
        velocity *= m
        return velocity + gradient, velocity
    velocity = m * velocity
    velocity += gradient
    return velocity, velocity


@dataclasses.dataclass(frozen=True)
class momentum_correction(TakesMomentum, name="momentum_correction"):
    """Accumulate velocities instead of gradients, per rank, before anything is left out.

    Plain: ``u = m u + g``, passes on ``u``.  Nesterov: ``u = m (u + g)``, passes on ``u + g``.
    With ``masking`` the velocity is cleared where elements were sent (momentum factor masking),
    so that an element that was not sent for hundreds of steps is not driven by stale momentum.

    State: ``velocity``.  Must stand before error feedback: behind it, momentum would be applied to
    the residual again at every step.

    Options:
        momentum, nesterov: m, in [0, 1), and whether it is Nesterov's; ``None`` takes the
            optimizer's, from the context.
        masking: see above.

    Reference: Lin et al., ICLR 2018, sections 3.1 and 3.2.

    Of two elements the first is sent, and its velocity cleared:

    >>> correct, state = momentum_correction(0.9), {"velocity": np.array([1.0, 1.0])}
    >>> x, state = correct.update(np.array([2.0, 4.0]), state, Context())
    >>> x, correct.settle(np.array([2.9, 0.0]), state, Context())
    (array([2.9, 4.9]), {'velocity': array([0., 0.])})
    """

    masking: bool = True
    of_gradients = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("masking", self.masking, (True, False))

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        direction, velocity = heavy_ball(x, state["velocity"], *self.in_use(context))
        return direction, {"velocity": velocity}

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        if not self.masking:
            return state
        xp = backend_of(state["velocity"])
        if isinstance(sent, Sparse):
            return {"velocity": xp.put(state["velocity"], sent.indices, 0.0)}
        return {"velocity": xp.full_like(state["velocity"], 0.0)}


@dataclasses.dataclass(frozen=True)
class momentum_after_averaging(TakesMomentum, name="momentum_after_averaging"):
    """Ordinary momentum on the averaged gradient, for tensors that are sent in full.

    State: ``velocity``, equal on all ranks.

    Options:
        momentum, nesterov: as of :class:`momentum_correction`.

    >>> world = World(chain(momentum_after_averaging(0.9), via=allreduce()), size=2)
    >>> [world.exchange([np.array([4.0]), np.array([2.0])])[0].direction.item() for s in range(2)]
    [3.0, 5.7]
    """

    per_rank = False

    def finish(self, mean: Array, state: State, context: Context) -> tuple[Array, State]:
        direction, velocity = heavy_ball(mean, state["velocity"], *self.in_use(context))
        # The direction becomes the gradient, which its owner may clip in place.
        return backend_of(direction).copy(direction), {"velocity": velocity}
