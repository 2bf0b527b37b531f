"""Error feedback: what was not sent now is added to the next gradient."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Transform
from hvd_compress.config import checked, choice, numbers
from hvd_compress.errors import ConfigError
from hvd_compress.transforms.momentum import check_momentum


class Feedback(Transform):
    """``x = gradient + memory`` is passed on; after the exchange the memory becomes what remains.

    Subclasses name the memory in ``keys``, and may say what remains, if that is not all.
    """

    feeds_back = True
    elementwise = True

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        (key,) = self.keys
        x = x + state[key]
        return x, {**state, "passed on": x}

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        (key,) = self.keys
        return {key: self.remaining(state["passed on"], sent, state[key])}

    def remaining(self, x: Array, sent: Array | Sparse, old: Array) -> Array:
        """Return the next memory.

        Args:
            x: the array as it was passed on, which may be changed in place.
            sent: the part of it that was sent.
            old: the memory before.
        """
        return unsent(x, sent)


def unsent(x: Array, sent: Array | Sparse, keep: float = 1) -> Array:
    """Return ``x - sent``; with ``keep`` only that part of it where something was sent."""
    xp = backend_of(x)
    left = xp.take(x, sent.indices) - sent.values if isinstance(sent, Sparse) else x - sent
    if keep != 1:
        left = keep * left
    return xp.put(x, sent.indices, left) if isinstance(sent, Sparse) else left


@dataclasses.dataclass(frozen=True)
class error_feedback(Feedback, name="error_feedback"):
    """``x = gradient + residual``; after the exchange ``residual = x - sent``, exactly.

    State: ``residual``, as large as the gradient.

    Options:
        units: of the residual.  "gradient": it is applied at the rate of the step that sends it.
            "step", as in Karimireddy et al. and Beznosikov et al. (JMLR 2023): it is applied as the
            step that it was.  Then e = rate * (x - sent) and x = gradient + e / rate.  That is for
            plain SGD; at a rate of 0 nothing of it is sent.

    "step" needs the learning rate, which PyTorch's optimizers and ``Reducer.learning_rate`` tell;
    elsewhere it raises ``ConfigError``.

    Reference: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.

    >>> world = World(chain(error_feedback(), via=allgather(top_k(0.5))), size=1)
    >>> [world.exchange([np.array([4.0, 3.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0], [0.0, 6.0]]
    """

    units: str = choice("gradient", "step")

    keys = ("residual",)

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


def _rate(context: Context) -> float:
    if context.learning_rate is None:
        raise ConfigError(
            "error_feedback(units='step') needs the learning rate: it runs in PyTorch, with an "
            "optimizer whose parameter groups have an 'lr', and in a Reducer whose learning_rate "
            "is set; elsewhere units='gradient'"
        )
    return float(context.learning_rate)


@dataclasses.dataclass(frozen=True)
class fading_memory(Feedback, name="fading_memory"):
    """``x = gradient + memory``; after the exchange ``memory = x - sent``, but where something was
    sent, only the part ``keep`` of it stays.

    A ``keep`` below 1 is for operators that cannot express some components at all, which would grow
    until the operator selects nothing else.

    State: ``memory``, as large as the gradient.

    Options:
        keep: in [0, 1].

    >>> world = World(chain(fading_memory(keep=0.5), via=allgather(linear(2))), size=1)
    >>> world.exchange([np.array([4.0, 3.0])])[0].mean, world.states["tensor"][0]["memory"]
    (array([4., 4.]), array([ 0. , -0.5]))
    """

    keep: float = checked(numbers("in [0, 1]", lambda keep: 0 <= keep <= 1), 0.0)

    keys = ("memory",)

    def remaining(self, x: Array, sent: Array | Sparse, old: Array) -> Array:
        return unsent(x, sent, self.keep)


@dataclasses.dataclass(frozen=True)
class momentum_feedback(Feedback, name="momentum_feedback"):
    """``x = decay momentum + gradient``; after the exchange ``momentum = x - sent``: what is not
    sent is the momentum of later steps.

    State: ``momentum``, as large as the gradient; differs between ranks.

    Options:
        decay: what is left of momentum after a step, in [0, 1).

    Reference: Peng, Quesnelle, Kingma, DeMo, arXiv 2411.19870.  Differs from it in: gradients are
    added up, where it adds up learning rate * gradient.

    >>> world = World(chain(momentum_feedback(0.5), via=allgather(top_k(0.5))), size=1)
    >>> [world.exchange([np.array([4.0, 3.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0], [0.0, 4.5]]
    """

    decay: float = checked(check_momentum, 0.999)

    keys = ("momentum",)

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        return super().update(x, {"momentum": self.decay * state["momentum"]}, context)
