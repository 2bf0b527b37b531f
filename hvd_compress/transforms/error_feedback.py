"""Error feedback: what was not sent now is added to the next gradient."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.transforms.feedback import Feedback, unsent


@dataclasses.dataclass(frozen=True)
class error_feedback(Feedback, name="error_feedback"):
    """``x = gradient + residual``; after the exchange ``residual = x - sent``, exactly.

    State: ``residual``, as large as the gradient.  Called local gradient accumulation in DGC.
    Reference: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.

    Options:
        units: of the residual.  "gradient": when the learning rate falls from a to b, what waits is
            applied at b.  "step", as Karimireddy et al. and Beznosikov et al. (JMLR 2023) have it:
            the residual is e = rate * (x - sent) and x = gradient + e / rate, so what waits is
            applied as the step it was when it was left out, whatever the rate does meanwhile.  With
            plain SGD, x~ = x - mean(e) then obeys x~' = x~ - rate * mean(gradient) for every
            operator; with momentum in the optimizer, or Adam, steps are no multiples of the rate
            and this means little.  In a step with rate 0 nothing of the residual is sent.

    At a constant rate both do the same up to rounding.  "step" needs the learning rate, which
    PyTorch's optimizers and ``Reducer.learning_rate`` tell; elsewhere it raises ``ConfigError``.

    >>> world = World(chain(error_feedback(), via=allgather(top_k(0.5))), size=1)
    >>> [world.exchange([np.array([4.0, 3.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0], [0.0, 6.0]]
    >>> world.states["tensor"][0]["residual"]
    array([4., 0.])
    """

    units: str = "gradient"

    keys = ("residual",)

    def __post_init__(self) -> None:
        check_choice("units", self.units, ("gradient", "step"))

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        return self.units == "gradient"  # else it is a tensor's learning rate, too

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        if self.units == "gradient":
            return super().update(x, state, context)
        rate = _rate(context)
        x = x + state["residual"] / rate if rate else x + 0 * state["residual"]
        return x, {**state, "passed on": x}

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        if self.units == "gradient":
            return super().settle(sent, state, context)
        rate = _rate(context)
        left = rate * self.remaining(state["passed on"], sent, state["residual"])
        return {"residual": left if rate else state["residual"]}

    def remaining(self, x: Array, sent: Array | Sparse, old: Array) -> Array:
        return unsent(x, sent)


def _rate(context: Context) -> float:
    if context.learning_rate is None:
        raise ConfigError(
            "error_feedback(units='step') needs the learning rate: it runs in PyTorch, with an "
            "optimizer whose parameter groups have an 'lr', and in a Reducer whose learning_rate "
            "is set; elsewhere units='gradient'"
        )
    return float(context.learning_rate)
