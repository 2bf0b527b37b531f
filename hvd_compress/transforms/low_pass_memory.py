"""Error feedback through a low-pass filter."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Transform
from hvd_compress.config import check_fraction


@dataclasses.dataclass(frozen=True)
class low_pass_memory(Transform, name="low_pass_memory"):
    """``x = gradient + memory``; after the exchange
    ``memory = (1 - beta) memory + beta (x - sent)``.

    With ``beta=1`` this is error feedback.  A smaller one takes in only that part of what is left
    out, and drops the rest of it; and where something is sent, it keeps a part of what it had.

    State: ``memory``, as large as the gradient.  Reference: Chen et al., ScaleCom, NeurIPS 2020.

    Options:
        beta: in (0, 1].
    """

    beta: float = 0.1

    keys = ("memory",)
    feeds_back = True

    def __post_init__(self) -> None:
        check_fraction("beta", self.beta)

    def update(self, x: Array, state: State, context: Context) -> tuple[Array, State]:
        x = x + state["memory"]
        return x, {"memory": state["memory"], "entered": x}

    def settle(self, sent: Array | Sparse, state: State, context: Context) -> State:
        memory = (1 - self.beta) * state["memory"] + self.beta * state["entered"]
        if not isinstance(sent, Sparse):
            return {"memory": memory - self.beta * sent}
        xp = backend_of(memory)
        return {"memory": xp.add_at(memory, sent.indices, -self.beta * sent.values)}
