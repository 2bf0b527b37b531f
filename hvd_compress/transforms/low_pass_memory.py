"""Error feedback through a low-pass filter."""

from __future__ import annotations

import dataclasses

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Sparse
from hvd_compress.config import check_fraction
from hvd_compress.transforms.feedback import Feedback


@dataclasses.dataclass(frozen=True)
class low_pass_memory(Feedback, name="low_pass_memory"):
    """``x = gradient + memory``; after the exchange
    ``memory = (1 - beta) memory + beta (x - sent)``.

    With ``beta=1`` this is error feedback.  A smaller one takes in only that part of what is left
    out, and drops the rest of it; and where something is sent, it keeps a part of what it had.

    State: ``memory``, as large as the gradient.  Reference: Chen et al., ScaleCom, NeurIPS 2020.

    Options:
        beta: in (0, 1].

    >>> world = World(chain(low_pass_memory(beta=0.1), via=allgather(top_k(0.5))), size=1)
    >>> [world.exchange([np.array([4.0, 3.0])])[0].mean.tolist() for step in range(2)]
    [[4.0, 0.0], [4.0, 0.0]]
    >>> world.states["tensor"][0]["memory"].round(3)
    array([0. , 0.6])
    """

    beta: float = 0.1

    keys = ("memory",)

    def __post_init__(self) -> None:
        check_fraction("beta", self.beta)

    def remaining(self, x: Array, sent: Array | Sparse, old: Array) -> Array:
        memory = (1 - self.beta) * old + self.beta * x
        if not isinstance(sent, Sparse):
            return memory - self.beta * sent
        return backend_of(memory).add_at(memory, sent.indices, -self.beta * sent.values)
