"""Momentum inside the exchange: before it (per rank) or after it (on the average)."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Transform
from hvd_compress.config import check_choice, is_number
from hvd_compress.errors import ConfigError


def check_momentum(momentum: float | None) -> None:
    m = 0.0 if momentum is None else momentum
    if not is_number(m) or not 0 <= m < 1:
        raise ConfigError(f"momentum must be in [0, 1); got {momentum!r}")


@dataclasses.dataclass(frozen=True)
class _Momentum(Transform):
    """``None`` takes the optimizer's momentum and Nesterov flag from the context."""

    momentum: float | None = None
    nesterov: bool | None = None

    def __post_init__(self) -> None:
        check_choice("nesterov", self.nesterov, (None, True, False))
        check_momentum(self.momentum)

    keys = ("velocity",)
    takes_momentum = True

    def _step(self, gradient: Array, velocity: Array, context: Context) -> tuple[Array, Array]:
        """(direction, new velocity); Lin et al. write Nesterov with the product m * velocity."""
        m = context.momentum if self.momentum is None else self.momentum
        nesterov = context.nesterov if self.nesterov is None else self.nesterov
        if nesterov:
            velocity = velocity + gradient
            velocity *= m
            return velocity + gradient, velocity
        velocity = m * velocity
        velocity += gradient
        return velocity, velocity


@dataclasses.dataclass(frozen=True)
class momentum_correction(_Momentum, name="momentum_correction"):
    """Accumulate velocities instead of gradients, per rank, before anything is left out.

    Plain: ``u = m u + g``, passes on ``u``.  Nesterov: ``u = m (u + g)``, passes on ``u + g``.
    With ``masking`` the velocity is cleared where elements were sent (momentum factor masking),
    so that a coordinate which waited for hundreds of steps is not driven by stale momentum.

    State: ``velocity``.  Reference: Lin et al., ICLR 2018, sections 3.1 and 3.2.  Must stand before
    error feedback: behind it, momentum would be applied to the residual again at every step.
    """

    masking: bool = True
    of_gradients = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("masking", self.masking, (True, False))

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        direction, velocity = self._step(x, state["velocity"], context)
        return direction, {"velocity": velocity}

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        if not self.masking:
            return state
        xp = backend_of(state["velocity"])
        if isinstance(sent, Sparse):
            return {"velocity": xp.put(state["velocity"], sent.indices, 0.0)}
        return {"velocity": xp.full_like(state["velocity"], 0.0)}


@dataclasses.dataclass(frozen=True)
class moving_average(_Momentum, name="moving_average"):
    """``m = beta m + (1 - beta) g``, per rank, passes on ``m``; or, if ``nesterov``, what the next
    ``m`` would be if the gradient came again, ``beta m + (1 - beta) g``.

    State: ``velocity`` m.

    Options:
        momentum: beta; ``None`` takes the optimizer's momentum from the context.
        nesterov: see above; ``None`` takes the optimizer's.
    """

    of_gradients = True
    averages_momentum = True

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        beta = context.momentum if self.momentum is None else self.momentum
        nesterov = context.nesterov if self.nesterov is None else self.nesterov
        own = (1 - beta) * x
        average = beta * state["velocity"] + own
        return beta * average + own if nesterov else average, {"velocity": average}


@dataclasses.dataclass(frozen=True)
class smoothing(Transform, name="smoothing"):
    """``a = weight a + (1 - weight) g``, per rank, passes on ``a``: against noise.
    The optimizer's momentum stays where it is.

    State: ``average`` a, which starts from zero.
    """

    weight: float

    keys = ("average",)
    of_gradients = True

    def __post_init__(self) -> None:
        if self.weight is None:
            raise ConfigError("weight must be a number in [0, 1): no optimizer lends one")
        check_momentum(self.weight)

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        average = self.weight * state["average"] + (1 - self.weight) * x
        return average, {"average": average}


@dataclasses.dataclass(frozen=True)
class momentum_after_averaging(_Momentum, name="momentum_after_averaging"):
    """Ordinary momentum on the averaged gradient, for tensors that travel whole.

    State: ``velocity``, equal on all ranks.
    """

    per_rank = False

    def finish(self, mean: Array, state: State, context: Context) -> tuple[Array, State]:
        direction, velocity = self._step(mean, state["velocity"], context)
        # The direction becomes the gradient, which its owner may clip in place.
        return backend_of(direction).copy(direction), {"velocity": velocity}
