"""The exchanges of 1-bit Adam (Tang et al., ICML 2021) and 0/1 Adam (Lu et al., ICLR 2023)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Array,
    Compressor,
    Context,
    Exchange,
    Outcome,
    Place,
    State,
)
from hvd_compress.chain import Chain, chain
from hvd_compress.codecs import scaled_sign
from hvd_compress.config import checked, choice, converted, is_whole, numbers
from hvd_compress.errors import ConfigError
from hvd_compress.meetings import allreduce, alltoall, dense_until
from hvd_compress.methods.chained import Chained, check_min_size
from hvd_compress.methods.composed import Partition, rule
from hvd_compress.methods.dense import NoCompression
from hvd_compress.requests import Sum
from hvd_compress.schedules import After, Start, as_start, started
from hvd_compress.transforms import averaged_momentum, error_feedback
from hvd_compress.transforms.momentum import check_momentum


def check_freeze_step(steps: Any) -> None:
    """Raise ``ConfigError`` unless an optimizer can count to it."""
    if not is_whole(steps) or steps < 1:
        raise ConfigError(
            f"freeze_step={steps!r} must be a number of steps, 1 or more: at least one must "
            "estimate Adam's variance"
        )


def as_freeze_step(value: Any) -> bool | After:
    """Return the schedule for a number of steps; a schedule or a bool stays as it is."""
    if isinstance(value, bool | After):
        return value
    check_freeze_step(value)
    return as_start(value)


@dataclasses.dataclass(frozen=True)
class OneBitAdamCompression(Chained, name="onebit_adam"):
    """Average gradients first, and send Adam's momentum in one bit per element later::

        compression=adam.compressor()

    ``OneBitAdam`` or ``OneBitLAMB`` makes this with its own options.  After freeze_step exchanges::

        x_i = beta1 u + (1 - beta1) g_i + residual_i     on each rank
        sent_i = scale_i * sign(x_i);  residual_i = x_i - sent_i
        u = 1-bit mean of sent_i                         on all ranks: the new momentum

    State: ``average`` u, equal on all ranks; ``residual`` and ``owner_residual``.

    Options:
        beta1: the optimizer's.
        freeze_step: a number of exchanges, 1 or more, or ``After("epoch", ...)``.  The paper takes
            15 to 20 % of the training, so the default suits long ones.
        norm: scale of the signs: "l1", mean |x|, or "l2", the norm over sqrt(d).
        min_size: tensors with fewer elements are summed whole; their momentum is exact.

    Reference: Tang et al., ICML 2021, arXiv 2102.02888.

    >>> world = World(OneBitAdamCompression(beta1=0.5, freeze_step=1, min_size=1), size=1)
    >>> [world.exchange([np.array([4.0, -2.0])])[0].direction.tolist() for step in range(2)]
    [[4.0, -2.0], [2.25, -2.25]]
    """

    reference = "Tang et al., ICML 2021"

    beta1: float = checked(check_momentum, 0.9)
    freeze_step: Start = dataclasses.field(default=100_000, metadata=converted(as_freeze_step))
    norm: str = "l1"
    min_size: int = checked(check_min_size, 1024)

    partner = "OneBitAdam"
    is_steady = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self._compressed, self._whole  # their blocks check the other options

    def frozen(self, step: int, epoch: int | None) -> bool:
        """Return whether the exchange of that step returns a momentum instead of a gradient."""
        return started(self.freeze_step, step, epoch)

    def chain(self, gradient: Array, context: Context) -> Chain:
        n = math.prod(backend_of(gradient).shape(gradient))
        return self._compressed if n >= self.min_size else self._whole

    @functools.cached_property
    def _compressed(self) -> Chain:
        via = dense_until(self.freeze_step, alltoall(scaled_sign(self.norm)))
        return chain(averaged_momentum(self.beta1, self.freeze_step), error_feedback(), via=via)

    @functools.cached_property
    def _whole(self) -> Chain:
        return chain(averaged_momentum(self.beta1, self.freeze_step), via=allreduce())


#: the last step that a schedule knows, so that a graph can count to it
_FOREVER = 2**62
_check_steps = numbers(
    "a number of steps, 1 or more", lambda steps: 1 <= steps <= _FOREVER, whole=True
)


@dataclasses.dataclass(frozen=True)
class ZeroOneAdamCompression(Chained, name="zero_one_adam"):
    """Send gradients in full while Adam's variance learns, in one bit in between, and few later::

        compression=adam.compressor()

    ``ZeroOneAdam`` makes this with its own options.  Until ``var_freeze_step`` gradients are summed
    in steps of the variance.  The other steps send one bit per element, with error feedback.  Then
    the optimizer synchronizes parameters from time to time.

    State: ``residual`` and ``owner_residual``, which do not change while gradients are summed.

    Options:
        var_freeze_step: the last step of the variance, from 1.
        var_update_scaler: number of the variance's steps after which their interval doubles.
        local_step_scaler, local_step_clipper: number of steps after which the interval of
            synchronizations doubles, and its largest value.
        norm: "l1" or "l2": see :class:`OneBitAdamCompression`.
        min_size: tensors with fewer elements are summed whole, whenever they are sent.

    Reference: Lu, Li, Zhang, De Sa, He, ICLR 2023, arXiv 2202.06009.

    >>> options = {"var_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 2}
    >>> method = ZeroOneAdamCompression(var_freeze_step=4, **options)
    >>> [method.phase(step) for step in range(1, 9)]
    ['variance', 'variance', 'one_bit', 'variance', 'sync', 'sync', 'local', 'sync']
    """

    reference = "Lu et al., ICLR 2023"

    var_freeze_step: int = checked(_check_steps, 100_000)
    var_update_scaler: int = checked(_check_steps, 16)
    local_step_scaler: int = checked(_check_steps, 32_678)
    local_step_clipper: int = checked(_check_steps, 16)
    norm: str = choice("l1", "l2")
    min_size: int = checked(check_min_size, 1024)

    partner = "ZeroOneAdam"
    phases = ("one_bit", "variance", "local", "sync")

    def phase(self, step: int) -> str:
        """Return "variance", "one_bit", "local" or "sync"; ``step`` counts from 1."""
        return self.phases[int(self.phase_index(np.asarray(step)))]

    def phase_index(self, step: Array) -> Array:
        xp, due = backend_of(step), False
        for after, until, interval in self._spans:
            due = due | ((step > after) & (step <= until) & (step % interval == 0))
        local = step > self.var_freeze_step
        return 2 * xp.cast(local, "int32") + xp.cast(due, "int32")

    @functools.cached_property
    def _spans(self) -> list[tuple[int, int, int]]:
        """(after, until, interval): in each span something is due at multiples of an interval."""
        found, after, interval = [], 0, 1
        while after < self.var_freeze_step:
            until = (after // interval + self.var_update_scaler) * interval
            found.append((after, min(until, self.var_freeze_step), interval))
            after, interval = until, 2 * interval
        after, interval = self.var_freeze_step, 1
        while interval < self.local_step_clipper:
            until = min(after + self.local_step_scaler, _FOREVER)
            found.append((after, until, interval))
            after, interval = until, 2 * interval
        return [*found, (after, _FOREVER, self.local_step_clipper)]

    @property
    def for_parameters(self) -> Compressor:
        """The method for the change of parameters in local steps: one bit per element."""
        return Partition((rule(self._one_bit, min_size=self.min_size),), NoCompression())

    def chain(self, gradient: Array, context: Context) -> Chain:
        n = math.prod(backend_of(gradient).shape(gradient))
        return self._one_bit if n >= self.min_size else self._whole

    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        phase = context.phase or self.phase(context.step + 1)
        if phase == "one_bit":
            return (yield from self.chain(gradient, context).exchange(gradient, state, context))
        if phase == "variance":
            outcome = yield from self._whole.exchange(gradient, {}, context)
            return outcome._replace(state=state)
        xp = backend_of(gradient)
        nothing = yield Sum(xp.zeros(0, xp.widen(gradient)))  # of which engines send nothing
        return Outcome(gradient, nothing, state)

    def place(self, gradient: Array, context: Context) -> Place | None:
        phase = context.phase or self.phase(context.step + 1)
        if phase not in ("one_bit", "variance"):
            return None
        chain = self.chain(gradient, context) if phase == "one_bit" else self._whole
        return chain.place(gradient, context)

    encode = Compressor.encode

    @functools.cached_property
    def _one_bit(self) -> Chain:
        return chain(error_feedback(), via=alltoall(scaled_sign(self.norm)))

    @functools.cached_property
    def _whole(self) -> Chain:
        return chain(via=allreduce())
