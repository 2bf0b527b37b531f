"""Moving averages of a rank's own gradients."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array, Context, State
from hvd_compress.chain import Transform
from hvd_compress.transforms.taking_momentum import TakesMomentum, check_momentum


def averaged(average: Array, x: Array, weight: float) -> Array:
    """Return the next exponential moving average, ``weight * average + (1 - weight) * x``."""
    return weight * average + (1 - weight) * x


@dataclasses.dataclass(frozen=True)
class moving_average(TakesMomentum, name="moving_average"):
    """``m = beta m + (1 - beta) g``, per rank, passes on ``m``; or, if ``nesterov``, what the next
    ``m`` would be if the gradient came again, ``beta m + (1 - beta) g``.

    It takes the place of the optimizer's momentum: see :class:`smoothing` for an average beside it.

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
    """``a = weight a + (1 - weight) g``, per rank, passes on ``a``: against noise.

    The optimizer's momentum stays where it is: see :class:`moving_average` for an average in its
    place.

    State: ``average`` a, which starts from zero.

    Options:
        weight: of the past, in [0, 1).

    >>> smoothing(0.9).update(np.array([2.0]), {"average": np.array([1.0])}, Context())[0]
    array([1.1])
    """

    weight: float

    keys = ("average",)
    of_gradients = True
    elementwise = True

    def __post_init__(self) -> None:
        check_momentum("weight", self.weight)

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        average = averaged(state["average"], x, self.weight)
        return average, {"average": average}
