"""Error feedback: what was not sent now is added to the next gradient."""

from __future__ import annotations

import dataclasses

from hvd_compress.backend import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Transform


@dataclasses.dataclass(frozen=True)
class error_feedback(Transform, name="error_feedback"):
    """``x = gradient + residual``; after the exchange ``residual = x - sent``, exactly.

    State: ``residual``, as large as the gradient.  Called local gradient accumulation in DGC.
    Reference: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019.
    """

    keys = ("residual",)

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        x = x + state["residual"]
        return x, {"residual": x}

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        x = state["residual"]
        if not isinstance(sent, Sparse):
            return {"residual": x - sent}
        xp = backend_of(x)
        left = xp.take(x, sent.indices) - sent.values
        return {"residual": xp.put(x, sent.indices, left)}
