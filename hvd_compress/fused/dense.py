"""Sums of whole buckets, with momentum after averaging."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context, Joint, Outcome, Request, State, Sum
from hvd_compress.chain import Transform, in_range


class Tensor(NamedTuple):
    """One tensor of a bucket in one step; ``x`` is the flat gradient."""

    gradient: Array
    x: Array
    state: State
    scratch: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class FusedSum:
    """The exchange of all tensors of a bucket that are summed as they are.

    Attributes:
        before: transforms without a state that come first.
        momentum: a transform that applies momentum to the average, or ``None``.
        in_use: its momentum and Nesterov flag.
        wire, algorithm: of the sum.
        size: the number of ranks.
    """

    before: tuple[Transform, ...]
    momentum: Any
    in_use: tuple[float, bool]
    wire: str | None
    algorithm: str | None
    size: int

    def request(self, gradient: Array, state: State, context: Context) -> Joint | None:
        """See :class:`hvd_compress.chain.Fused`: arrays that are not widened are taken."""
        xp = backend_of(gradient)
        dtype = xp.dtype(gradient)
        if context.scratch is None or dtype not in ("float32", "float64") or not xp.size(gradient):
            return None
        x = xp.widen(gradient)
        for transform in self.before:
            x, _ = transform.update(x, {}, context)
        tensor = Tensor(gradient, x, state, context.scratch)
        key = xp.__name__, dtype, getattr(x, "device", None)
        return Joint(self, tensor, weight=xp.size(x), key=key)

    def __call__(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        xp = backend_of(tensors[0].x)
        sizes = [xp.size(t.x) for t in tensors]
        parts = [t.x for t in tensors]
        own = _joined(xp, parts)
        if not xp.all_finite(own):  # of such a tensor the others must see nothing else
            parts = [x if xp.all_finite(x) else xp.full_like(x, math.nan) for x in parts]
            own = _joined(xp, parts)
        request = Sum(own, self.wire, self.algorithm, owned=len(tensors) > 1)
        mean = (yield request) / self.size
        fine = bool(xp.all_finite(mean))
        means = xp.split(mean, sizes)
        sent = [xp.round_to(x, self.wire) for x in parts]
        directions, states = [None] * len(tensors), [t.state for t in tensors]
        if self.momentum is not None:
            old = self._velocity(xp, tensors)
            direction, velocity = self.momentum.step(mean, old, *self.in_use)
            new = xp.split(velocity, sizes)
            if direction is velocity:  # the owner of a gradient may clip it in place
                direction = xp.copy(direction)
            directions, states = xp.split(direction, sizes), [{"velocity": x} for x in new]
            tensors[0].scratch["velocities"] = velocity, new
        outcomes = []
        for tensor, mean, sent_, direction, state in zip(
            tensors, means, sent, directions, states, strict=True
        ):
            if not fine and not xp.all_finite(mean):
                direction, state = mean, in_range(tensor.state)
            shaped = xp.restore(mean, tensor.gradient)
            update = None if self.momentum is None else xp.restore(direction, tensor.gradient)
            outcomes.append(Outcome(shaped, sent_, state, update))
        return outcomes

    def _velocity(self, xp: Any, tensors: Sequence[Tensor]) -> Array:
        """The velocities end to end, which they are already unless a checkpoint was loaded."""
        kept, parts = tensors[0].scratch.get("velocities", (None, ()))
        own = [t.state["velocity"] for t in tensors]
        if len(parts) == len(own) and all(a is b for a, b in zip(own, parts, strict=True)):
            return kept
        return _joined(xp, own)


def _joined(xp: Any, arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else xp.concat(list(arrays))
