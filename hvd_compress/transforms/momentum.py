"""Momentum and moving averages inside the exchange, of a rank or of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Transform
from hvd_compress.config import checked, choice, converted, numbers
from hvd_compress.schedules import Start, as_start, started

check_momentum = numbers("a number in [0, 1)", lambda value: 0 <= value < 1)


@dataclasses.dataclass(frozen=True)
class TakesMomentum(Transform):
    """``momentum`` and ``nesterov``: ``None`` takes the optimizer's, from the context."""

    momentum: float | None = checked(
        numbers("a number in [0, 1)", lambda value: 0 <= value < 1, optional=True), None
    )
    nesterov: bool | None = choice(None, True, False)

    keys = ("velocity",)
    elementwise = True
    takes_momentum = True

    def in_use(self, context: Context) -> tuple[float, bool]:
        """Return momentum and Nesterov flag, of the options or else of the optimizer."""
        return (
            context.momentum if self.momentum is None else self.momentum,
            context.nesterov if self.nesterov is None else self.nesterov,
        )

    def momenta_in_use(self, momenta: Sequence[float]) -> Sequence[float]:
        """Return the momentum of each of several tensors, given the optimizer's."""
        return momenta if self.momentum is None else [self.momentum] * len(momenta)


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
    It must stand before error feedback, or would act on the residual again at every step.

    State: ``velocity``.

    Options:
        momentum, nesterov: m, in [0, 1), and whether it is Nesterov's; ``None`` takes the
            optimizer's, from the context.
        masking: the velocity is cleared where elements were sent, so that one that waited for
            hundreds of steps is not driven by stale momentum.

    Reference: Lin et al., ICLR 2018, sections 3.1 and 3.2.

    >>> correct, state = momentum_correction(0.9), {"velocity": np.array([1.0, 1.0])}
    >>> x, state = correct.update(np.array([2.0, 4.0]), state, Context())
    >>> x, correct.settle(np.array([2.9, 0.0]), state, Context())
    (array([2.9, 4.9]), {'velocity': array([0., 0.])})
    """

    masking: bool = choice(True, False)
    of_gradients = True

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


def averaged(average: Array, x: Array, weight: float) -> Array:
    """Return the next exponential moving average, ``weight * average + (1 - weight) * x``."""
    return weight * average + (1 - weight) * x


@dataclasses.dataclass(frozen=True)
class moving_average(TakesMomentum, name="moving_average"):
    """``m = beta m + (1 - beta) g``, per rank, passes on ``m``; or, if ``nesterov``, what the next
    ``m`` would be if the gradient came again.  It takes the place of the optimizer's momentum.

    State: ``velocity`` m, which starts from zero.

    Options:
        momentum: beta, in [0, 1); ``None`` takes the optimizer's, from the context.
        nesterov: see above; ``None`` takes the optimizer's.

    >>> state = {"velocity": np.array([1.0])}
    >>> moving_average(0.9).update(np.array([2.0]), state, Context())[0]
    array([1.1])
    """

    of_gradients = True
    averages_momentum = True

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        beta, nesterov = self.in_use(context)
        average = averaged(state["velocity"], x, beta)
        return averaged(average, x, beta) if nesterov else average, {"velocity": average}


@dataclasses.dataclass(frozen=True)
class smoothing(Transform, name="smoothing"):
    """``a = weight a + (1 - weight) g``, per rank, passes on ``a``: against noise, beside the
    optimizer's momentum, whose place :class:`moving_average` takes.

    State: ``average`` a, which starts from zero.

    Options:
        weight: of the past, in [0, 1).

    >>> smoothing(0.9).update(np.array([2.0]), {"average": np.array([1.0])}, Context())[0]
    array([1.1])
    """

    weight: float = checked(check_momentum)

    keys = ("average",)
    of_gradients = True
    elementwise = True

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        average = averaged(state["average"], x, self.weight)
        return average, {"average": average}


@dataclasses.dataclass(frozen=True)
class averaged_momentum(Transform, name="averaged_momentum"):
    """Average gradients until ``start``, and momenta from then on::

        before   passes on  g                      u = beta u + (1 - beta) mean(g)
        after    passes on  beta u + (1 - beta) g  u = mean of what was sent

    The optimizer steps along ``mean(g)`` before, and along ``u`` after.  It must stand before error
    feedback, or residuals would be averaged away.

    State: ``average`` u, equal on all ranks.

    Options:
        beta: of the moving average, in [0, 1).
        start: a number of exchanges, or ``After("epoch", ...)``.

    Reference: Tang et al., 1-bit Adam, ICML 2021.

    >>> world = World(chain(averaged_momentum(beta=0.5, start=1), via=allreduce()), size=1)
    >>> [world.exchange([np.array([4.0])])[0].direction.item() for step in range(3)]
    [4.0, 3.0, 3.5]
    """

    beta: float = checked(check_momentum, 0.9)
    start: Start = dataclasses.field(default=True, metadata=converted(as_start))

    keys = ("average",)
    per_rank = False
    of_gradients = True
    elementwise = True

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        if not started(self.start, context.step, context.epoch):
            return x, state
        return averaged(state["average"], x, self.beta), state

    def finish(self, mean: Array, state: State, context: Context) -> tuple[Array, State]:
        if not started(self.start, context.step, context.epoch):
            return mean, {"average": averaged(state["average"], mean, self.beta)}
        # The mean becomes the gradient, which its owner may clip in place.
        return mean, {"average": backend_of(mean).copy(mean)}
