"""Sums of whole buckets, with momentum after averaging."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from hvd_compress.backends import HostFunction, backend_of, numpy
from hvd_compress.base import Array, Context, Outcome, State
from hvd_compress.chain import Repeated, Transform, in_range
from hvd_compress.requests import Joint, Request, Sum
from hvd_compress.transforms.momentum import heavy_ball


class Tensor(NamedTuple):
    """One tensor of a bucket in one step; ``x`` is the flat gradient, and ``momentum`` that of the
    optimizer, which may change from step to step and from tensor to tensor."""

    gradient: Array
    x: Array
    state: State
    momentum: float
    scratch: dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class FusedSum:
    """The exchange of all tensors of a bucket that are summed as they are.

    Attributes:
        before: transforms without a state that come first.
        momentum: a transform that applies momentum to the average, or ``None``.
        nesterov: the flag in use.
        wire, algorithm: of the sum.
        size: the number of ranks.
    """

    sends_all: ClassVar[bool] = True

    before: tuple[Transform, ...]
    momentum: Any
    nesterov: bool
    wire: str | None
    algorithm: str | None
    size: int

    def request(self, gradient: Array, state: State, context: Context) -> Joint | None:
        """See :class:`hvd_compress.chain.Fused`: arrays that are not widened are taken."""
        if (scratch := context.scratch) is None or (key := _key(gradient)) is None:
            return None
        xp = backend_of(gradient)
        x = xp.widen(gradient)
        for transform in self.before:
            x, _ = transform.update(x, {}, context)
        tensor = Tensor(gradient, x, state, context.momentum, scratch)
        return Joint(self, tensor, weight=xp.size(x), key=key)

    def again(
        self, tensors: Repeated, key: Hashable, context: Context
    ) -> Generator[Request, Any, tuple[Sequence[Array], Mapping[int, State]]] | None:
        """See :class:`hvd_compress.chain.Fused`."""
        find = backend_of(tensors.gradients[0]).addresses
        if self.before or not isinstance(key, _Key):
            return None
        kind, velocities = (tensors.weights, key.dtype, key.device), None
        if find(tensors.gradients, *kind) is None:
            return None
        if self.momentum is not None:
            velocities = tensors.column("velocity")
            if velocities is None or find(velocities, *kind) is None:
                return None
        return self._again(tensors, velocities)

    def _again(
        self, tensors: Repeated, velocities: list[Array] | None
    ) -> Generator[Request, Any, tuple[Sequence[Array], Mapping[int, State]]]:
        gradients, sizes = tensors.gradients, list(tensors.weights)
        xp, states = backend_of(gradients[0]), dict[int, State]()
        _, total = yield from self._total(xp, gradients, sizes, owned=len(sizes) > 1)
        if velocities is None:
            xp.write_into(gradients, total, self.size)
            return gradients, states
        old = self._velocity(xp, velocities, sizes, tensors.scratch)
        mean = xp.divided(total, self.size)
        direction, velocity = self._step(xp, mean, old, sizes, tensors.momenta)
        xp.write_into(gradients, direction)
        if old is tensors.scratch.get("velocity"):  # of which the states are parts
            xp.write_into([old], velocity)
        else:
            states = dict(enumerate(self._states(xp, velocity, sizes, tensors.scratch)))
        return gradients, states

    def __call__(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        xp = backend_of(tensors[0].x)
        sizes = [xp.size(t.x) for t in tensors]
        own, total = yield from self._total(xp, [t.x for t in tensors], sizes)
        mean = xp.divided(total, self.size)
        means = xp.split(mean, sizes)
        sent = [xp.round_to(x, self.wire) for x in xp.split(own, sizes)]
        states: Sequence[State] = [t.state for t in tensors]
        updates: Sequence[Any] = [None] * len(tensors)
        if self.momentum is not None:
            scratch, momenta = tensors[0].scratch, [t.momentum for t in tensors]
            old = self._velocity(xp, [state["velocity"] for state in states], sizes, scratch)
            direction, velocity = self._step(xp, mean, old, sizes, momenta)
            states = self._states(xp, velocity, sizes, scratch)
            cuts = zip(xp.split(direction, sizes), tensors, strict=True)
            updates = [xp.restore(x, t.gradient) for x, t in cuts]
        return [
            Outcome(xp.restore(mean, tensor.gradient), sent_, state, update)
            for tensor, mean, sent_, state, update in zip(
                tensors, means, sent, states, updates, strict=True
            )
        ]

    def _total(
        self, xp: Any, parts: Sequence[Array], sizes: list[int], owned: bool = False
    ) -> Generator[Request, Any, tuple[Array, Array]]:
        """Return what was sent, before it was rounded, and the sum of all ranks, end to end;
        ``owned``: the sum may be made in the place of what was sent."""
        own = xp.end_to_end(parts)
        fine = xp.all_finite(own)
        if xp.traces or not fine:  # of such a tensor the others must see nothing else
            own = xp.choose(fine, lambda x=own: x, lambda x=own: _made_nan(xp, x, sizes))
        total = yield Sum(own, self.wire, self.algorithm, owned=owned)
        return own, total

    def _states(
        self, xp: Any, velocity: Array, sizes: list[int], scratch: dict[str, Any]
    ) -> list[State]:
        """Return the states of the tensors, parts of their velocities end to end."""
        if not xp.traces:
            scratch["velocity"] = velocity
        return [{"velocity": x} for x in xp.split(velocity, sizes)]

    def _step(
        self, xp: Any, mean: Array, old: Array, sizes: list[int], momenta: Sequence[float]
    ) -> tuple[Array, Array]:
        """Return the direction and the new velocity; where a tensor's mean is not finite, the mean
        and the old velocity."""

        def settled() -> tuple[Array, Array]:
            own = self.momentum.momentum
            of_each = momenta if own is None else [own]
            if len({*of_each}) == 1:
                direction, velocity = heavy_ball(mean, old, of_each[0], self.nesterov)
            else:
                cuts = xp.split(mean, sizes), xp.split(old, sizes), of_each
                moved = [heavy_ball(x, u, m, self.nesterov) for x, u, m in zip(*cuts, strict=True)]
                direction, velocity = (xp.concat([*parts]) for parts in zip(*moved, strict=True))
            if direction is velocity:  # the owner of a gradient may clip it in place
                direction = xp.copy(direction)
            return direction, velocity

        def restored() -> tuple[Array, Array]:
            direction, velocity = settled()
            outputs = [(xp.dtype(x), sum(sizes)) for x in (direction, velocity)]
            own = [mean, old, direction, velocity]
            direction, velocity = xp.on_host(_undoing(sizes), own, outputs, mean)
            return direction, velocity

        return xp.choose(xp.all_finite(mean), settled, restored)

    def _velocity(
        self,
        xp: Any,
        own: list[Array],
        sizes: list[int],
        scratch: dict[str, Any],
    ) -> Array:
        """The velocities end to end, which they are already unless a checkpoint was loaded or they
        were given other memory."""
        kept = scratch.get("velocity")
        if kept is not None and xp.size(kept) == sum(sizes):
            kind = xp.dtype(kept), getattr(kept, "device", None)
            places = (xp.addresses(arrays, sizes, *kind) for arrays in (own, xp.split(kept, sizes)))
            of_own, of_kept = places
            if of_own is not None and of_own == of_kept:
                return kept
        return xp.end_to_end(own)


class _Key(NamedTuple):
    """The key that tensors of a bucket have in common."""

    backend: str
    dtype: str
    device: Any


def _key(gradient: Array) -> _Key | None:
    """Return the key of a tensor; ``None`` if it is in no bucket."""
    xp = backend_of(gradient)
    dtype = xp.dtype(gradient)
    if dtype not in ("float32", "float64") or not xp.size(gradient):
        return None
    return _Key(xp.__name__, dtype, getattr(gradient, "device", None))


def _made_nan(xp: Any, x: Array, sizes: list[int]) -> Array:
    """Return ``x`` with NaN in all elements of the tensors that have a NaN or Inf."""

    def mark(x: np.ndarray) -> list[np.ndarray]:
        x = x.copy()
        for part in numpy.split(x, sizes):
            if not numpy.all_finite(part):
                part[:] = math.nan
        return [x]

    return xp.on_host(mark, [x], [(xp.dtype(x), sum(sizes))], x)[0]


def _undoing(sizes: list[int]) -> HostFunction:
    """Return a function of the flat mean, old velocity, direction and new velocity of tensors."""

    def undo(*arrays: np.ndarray) -> list[np.ndarray]:
        mean, old, direction, velocity = (x.copy() for x in arrays)
        for part, before, *results in zip(
            *(numpy.split(x, sizes) for x in (mean, old, direction, velocity)), strict=True
        ):
            if not numpy.all_finite(part):
                results[0][:] = part
                results[1][:] = in_range({"velocity": before})["velocity"]
        return [direction, velocity]

    return undo
