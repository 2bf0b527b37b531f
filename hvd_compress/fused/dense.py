"""Sums of whole buckets, with momentum after averaging."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from hvd_compress.backends import HostFunction, backend_of, numpy
from hvd_compress.base import Array, Averages, Context, Place, Plan, Spec, State, Tensors
from hvd_compress.chain import Transform, in_range
from hvd_compress.fused.in_place import Arrays, InPlacePlan, column_of, is_on_host
from hvd_compress.kernels import loops_of
from hvd_compress.requests import Request, Sum
from hvd_compress.transforms.momentum import heavy_ball


@dataclasses.dataclass(frozen=True, eq=False)
class FusedSum:
    """The sum of all tensors of a bucket as they are; see :class:`hvd_compress.base.Form`.

    Attributes:
        before: transforms without a state that come first.
        momentum: a transform that applies momentum to the average, or ``None``.
        nesterov: the flag in use.
        wire, algorithm: of the sum.
    """

    #: see :class:`hvd_compress.fused.in_place.InPlaceForm`
    sends_all: ClassVar[bool] = True
    additive: ClassVar[bool] = True

    before: tuple[Transform, ...]
    momentum: Any
    nesterov: bool
    wire: str | None
    algorithm: str | None

    def place(self, gradient: Array, context: Context) -> Place | None:
        """Take arrays that are not widened."""
        xp = backend_of(gradient)
        dtype, size = xp.dtype(gradient), xp.size(gradient)
        if dtype not in ("float32", "float64") or not size:
            return None
        x = xp.widen(gradient)
        for transform in self.before:
            x, _ = transform.update(x, {}, context)
        return Place(self, size, (xp.__name__, dtype, getattr(gradient, "device", None)), x)

    def plan(self, specs: Sequence[Spec], key: Hashable, step: Context) -> Plan:
        x = specs[0].x
        on_device = not is_on_host(x) and backend_of(x).dtype(x) == "float32"
        plan = SumOnDevice if on_device and loops_of(x) is not None else SumPlan
        return plan(self, specs, key, step)


class SumOnDevice(InPlacePlan):
    """Sums of tensors on a device, of which the host need not know whether they are finite."""

    form: FusedSum

    def __init__(self, form: FusedSum, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        super().__init__(form, specs, key, step)
        self.keys = () if form.momentum is None else ("velocity",)
        self._step = loops_of(specs[0].x).SumStep(self.sizes, specs[0].x)

    def meet(self, arrays: Arrays, step: Context) -> Generator[Request, Any, None]:
        form, columns = self.form, arrays.columns
        own = self._step.joined(columns)
        total = yield Sum(own, form.wire, form.algorithm, owned=True)
        momenta = None if form.momentum is None else form.momentum.momenta_in_use(arrays.momenta)
        self._step.settle(columns, total, self.size, momenta, form.nesterov)


class SumPlan(Plan):
    form: FusedSum

    def __init__(self, form: FusedSum, specs: Sequence[Spec], key: Hashable, step: Context) -> None:
        super().__init__(form, specs, key, step)
        self.counts = self._sizes = self.weights
        x = specs[0].x
        self._xp = xp = backend_of(x)
        self._kind = xp.dtype(x), getattr(x, "device", None)
        self._is_on_host = not xp.traces and is_on_host(x)
        # PyTorch rounds with fewer arrays in memory than NumPy.
        self._speaks_numpy = form.wire is None and self._is_on_host
        #: the velocities end to end, of which the states are parts
        self._velocity: Array | None = None

    def takes(self, tensors: Tensors) -> bool:
        if self.form.before:
            return False
        find = self._xp.addresses
        if find(tensors.gradients, self._sizes, *self._kind) is None:
            return False
        if self.form.momentum is None:
            return True
        column = column_of(tensors, "velocity")
        return column is not None and find(column, self._sizes, *self._kind) is not None

    def exchange(self, tensors: Tensors, step: Context) -> Generator[Request, Any, Averages]:
        xp, gradients, sizes = self._xp, tensors.gradients, self._sizes
        is_written = step.in_place and not xp.traces
        # Then the total is divided into the gradients, whatever its dtype is.
        narrow = is_written and self.form.momentum is None and self._is_on_host
        flat = gradients if tensors.flat is None else tensors.flat
        total = yield from self._total(xp, flat, step.in_place, narrow)
        if self.form.momentum is None and is_written:
            xp.write_into(gradients, total, self.size)
            return Averages(gradients, {})
        direction, states = xp.divided(total, self.size), dict[int, State]()
        if self.form.momentum is not None:
            old = self._old(xp, column_of(tensors, "velocity") or [])
            direction, velocity = self._step(xp, direction, old, tensors.momenta)
            if old is self._velocity and is_written:
                xp.write_into([old], velocity)
            else:
                states = {i: {"velocity": x} for i, x in enumerate(xp.split(velocity, sizes))}
                self._velocity = None if xp.traces else velocity
        if is_written:
            xp.write_into(gradients, direction)
            return Averages(gradients, states)
        parts = zip(xp.split(direction, sizes), gradients, strict=True)
        return Averages([xp.restore(x, gradient) for x, gradient in parts], states)

    def _total(
        self, xp: Any, parts: Sequence[Array], in_place: bool, narrow: bool
    ) -> Generator[Request, Any, Array]:
        own, sizes = xp.end_to_end(parts), self._sizes
        fine = xp.all_finite(own)
        if xp.traces or not fine:  # of such a tensor the others must see nothing else
            own = xp.choose(fine, lambda x=own: x, lambda x=own: _made_nan(xp, x, sizes))
        owned = (in_place or len(sizes) > 1) and not xp.traces
        if not self._speaks_numpy:
            request = Sum(own, self.form.wire, self.form.algorithm, owned, narrow)
            del own  # which the engine may let go of
            return (yield request)
        (flat,) = xp.flat_on_host([own])
        total = yield Sum(flat, algorithm=self.form.algorithm, owned=owned)
        return xp.from_numpy(total, own)

    def _step(
        self, xp: Any, mean: Array, old: Array, momenta: Sequence[float]
    ) -> tuple[Array, Array]:
        """Return the direction and the new velocity; where a tensor's mean is not finite, the mean
        and the old velocity."""
        sizes, nesterov = self._sizes, self.form.nesterov

        def settled() -> tuple[Array, Array]:
            of_each = self.form.momentum.momenta_in_use(momenta)
            if len({*of_each}) == 1:
                direction, velocity = heavy_ball(mean, old, of_each[0], nesterov)
            else:
                cuts = xp.split(mean, sizes), xp.split(old, sizes), of_each
                moved = [heavy_ball(x, u, m, nesterov) for x, u, m in zip(*cuts, strict=True)]
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

    def _old(self, xp: Any, own: list[Array]) -> Array:
        """Return the velocities end to end, which they are already unless a checkpoint was loaded
        or they were given other memory."""
        kept, sizes = self._velocity, self._sizes
        if kept is not None:
            places = (xp.addresses(x, sizes, *self._kind) for x in (own, xp.split(kept, sizes)))
            of_own, of_kept = places
            if of_own is not None and of_own == of_kept:
                return kept
        return xp.end_to_end(own)


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
