"""The base of all kinds of error feedback."""

from __future__ import annotations

import abc

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Sparse, State
from hvd_compress.chain import Transform


class Feedback(Transform):
    """``x = gradient + memory`` is passed on; after the exchange the memory becomes what remains.

    Subclasses name the memory in ``keys``, and say what remains.
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

    @abc.abstractmethod
    def remaining(self, x: Array, sent: Array | Sparse, old: Array) -> Array:
        """Return the next memory, given ``x`` as it was passed on, which may be changed in place,
        what was sent of it, and the memory before."""


def unsent(x: Array, sent: Array | Sparse, keep: float = 1) -> Array:
    """Return ``x - sent``; with ``keep`` only that part of it where something was sent."""
    xp = backend_of(x)
    left = xp.take(x, sent.indices) - sent.values if isinstance(sent, Sparse) else x - sent
    if keep != 1:
        left = keep * left
    return xp.put(x, sent.indices, left) if isinstance(sent, Sparse) else left
