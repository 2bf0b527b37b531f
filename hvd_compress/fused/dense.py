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
    ) -> Generator[Request, Any, tuple[list[Array], Sequence[State]]] | None:
        """See :class:`hvd_compress.chain.Fused`."""
        find = backend_of(tensors.gradients[0]).addresses
        if self.before or not isinstance(key, _Key):
            return None
        columns = [tensors.gradients]
        if self.momentum is not None:
            columns.append([state.get("velocity") for state in tensors.states])
            if any(x is None for x in columns[1]):
                return None
        kind = tensors.weights, key.dtype, key.device
        if any(find(arrays, *kind) is None for arrays in columns):
            return None
        return self._again(tensors)

    def _again(
        self, tensors: Repeated
    ) -> Generator[Request, Any, tuple[list[Array], Sequence[State]]]:
        xp, sizes = backend_of(tensors.gradients[0]), list(tensors.weights)
        parts = [xp.widen(x) for x in tensors.gradients]
        _, total = yield from self._total(xp, parts, sizes)
        if self.momentum is None:
            xp.write_into(tensors.gradients, total, self.size)
            return [*tensors.gradients], [{}] * len(sizes)
        old = self._velocity(xp, tensors.states, sizes, tensors.scratch)
        direction, states = self._moved(
            xp, xp.divided(total, self.size), old, sizes, tensors.momenta, tensors.scratch
        )
        cuts = zip(xp.split(direction, sizes), tensors.gradients, strict=True)
        return [xp.restore(x, gradient) for x, gradient in cuts], states

    def __call__(self, tensors: list[Tensor]) -> Generator[Request, Any, list[Outcome]]:
        xp = backend_of(tensors[0].x)
        sizes = [xp.size(t.x) for t in tensors]
        parts, total = yield from self._total(xp, [t.x for t in tensors], sizes)
        mean = xp.divided(total, self.size)
        means = xp.split(mean, sizes)
        sent = [xp.round_to(x, self.wire) for x in parts]
        states: Sequence[State] = [t.state for t in tensors]
        updates: Sequence[Any] = [None] * len(tensors)
        if self.momentum is not None:
            scratch, momenta = tensors[0].scratch, [t.momentum for t in tensors]
            old = self._velocity(xp, states, sizes, scratch)
            direction, states = self._moved(xp, mean, old, sizes, momenta, scratch)
            cuts = zip(xp.split(direction, sizes), tensors, strict=True)
            updates = [xp.restore(x, t.gradient) for x, t in cuts]
        return [
            Outcome(xp.restore(mean, tensor.gradient), sent_, state, update)
            for tensor, mean, sent_, state, update in zip(
                tensors, means, sent, states, updates, strict=True
            )
        ]

    def _total(
        self, xp: Any, parts: list[Array], sizes: list[int]
    ) -> Generator[Request, Any, tuple[list[Array], Array]]:
        """Return what was sent of each tensor, before it was rounded, and the sum of all ranks."""
        own = _joined(xp, parts)
        fine = xp.all_finite(own)
        if xp.traces or not fine:  # of such a tensor the others must see nothing else
            own = xp.choose(fine, lambda x=own: x, lambda x=own: _made_nan(xp, x, sizes))
            parts = xp.split(own, sizes)
        total = yield Sum(own, self.wire, self.algorithm, owned=len(parts) > 1)
        return parts, total

    def _moved(
        self,
        xp: Any,
        mean: Array,
        old: Array,
        sizes: list[int],
        momenta: Sequence[float],
        scratch: dict[str, Any],
    ) -> tuple[Array, list[State]]:
        """Return the direction and the new states, from the old velocity."""
        direction, velocity = self._step(xp, mean, old, sizes, momenta)
        if not xp.traces:
            scratch["velocity"] = velocity
        return direction, [{"velocity": x} for x in xp.split(velocity, sizes)]

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
        states: Sequence[Mapping[str, Array]],
        sizes: list[int],
        scratch: dict[str, Any],
    ) -> Array:
        """The velocities end to end, which they are already unless a checkpoint was loaded or they
        were given other memory."""
        kept, own = scratch.get("velocity"), [state["velocity"] for state in states]
        if kept is not None and xp.size(kept) == sum(sizes):
            kind = xp.dtype(kept), getattr(kept, "device", None)
            places = (xp.addresses(arrays, sizes, *kind) for arrays in (own, xp.split(kept, sizes)))
            of_own, of_kept = places
            if of_own is not None and of_own == of_kept:
                return kept
        return _joined(xp, own)


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


def _joined(xp: Any, arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else xp.concat(list(arrays))


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
