"""Error feedback that forgets what was sent wrongly."""

from __future__ import annotations

import dataclasses

from hvd_compress.base import Array, Sparse
from hvd_compress.config import is_number
from hvd_compress.errors import ConfigError
from hvd_compress.transforms.feedback import Feedback, unsent


@dataclasses.dataclass(frozen=True)
class fading_memory(Feedback, name="fading_memory"):
    """``x = gradient + memory``; after the exchange ``memory = x - sent``, but where something was
    sent, only the part ``keep`` of it stays.

    With ``keep=1`` this is error feedback.  A smaller ``keep`` is for operators that cannot express
    some components at all: with error feedback these would grow until the operator selects nothing
    else.

    State: ``memory``, as large as the gradient.

    Options:
        keep: in [0, 1].

    Both arrive as 4, and half of the error of the second is kept:

    >>> world = World(chain(fading_memory(keep=0.5), via=allgather(linear(2))), size=1)
    >>> world.exchange([np.array([4.0, 3.0])])[0].mean, world.states["tensor"][0]["memory"]
    (array([4., 4.]), array([ 0. , -0.5]))
    """

    keep: float = 0.0

    keys = ("memory",)

    def __post_init__(self) -> None:
        keep = self.keep
        if not is_number(keep) or not 0 <= keep <= 1:
            raise ConfigError(f"keep must be in [0, 1]; got {keep!r}")

    def remaining(self, x: Array, sent: Array | Sparse, old: Array) -> Array:
        return unsent(x, sent, self.keep)
