"""Error feedback: what was not sent now is added to the next gradient."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Transform


@dataclasses.dataclass(frozen=True)
class error_feedback(Transform, name="error_feedback"):
    """``x = gradient + residual``; after the exchange ``residual = x - sent``, exactly.

    State: ``residual``, as large as the gradient.  Called local gradient accumulation in DGC.
    Reference: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.

    Differs from the latter and from Beznosikov et al. (JMLR 2023) in: the residual is in units of
    the gradient, where theirs is in units of the step, e = learning rate * residual.  At a constant
    rate this is the same, but for operators that do not scale with what they get, such as rounding
    to given levels.  When the rate falls from a to b, what waits is applied at b instead of a.  We
    keep to gradients because an exchange does not know the rate, which an optimizer may have many
    of, or none (Adam); and because what waits from before the change would else arrive as steps of
    the old size.  For a study that needs steps, hand ``learning rate * gradient`` to the exchange
    and subtract what comes back: that is theirs exactly, whatever the rate does.
    """

    keys = ("residual",)
    feeds_back = True

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        x = x + state["residual"]
        return x, {"residual": x}

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        return {"residual": unsent(state["residual"], sent)}


def unsent(x: Array, sent: Array | Sparse, keep: float = 1) -> Array:
    """``x - sent``; where something was sent, the part ``keep`` of it."""
    xp = backend_of(x)
    left = xp.take(x, sent.indices) - sent.values if isinstance(sent, Sparse) else x - sent
    if keep != 1:
        left = keep * left
    return xp.put(x, sent.indices, left) if isinstance(sent, Sparse) else left
