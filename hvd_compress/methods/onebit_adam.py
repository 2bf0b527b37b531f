"""The exchange of 1-bit Adam (Tang et al., ICML 2021, arXiv 2102.02888)."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Context
from hvd_compress.chain import Chain, chain
from hvd_compress.codecs import scaled_sign
from hvd_compress.config import checked, converted, is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.meetings import allreduce, alltoall, dense_until
from hvd_compress.methods.chained import Chained, check_min_size
from hvd_compress.schedules import After, Start, as_start, started
from hvd_compress.transforms import averaged_momentum, error_feedback


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
    """Average gradients first, and Adam's momentum in one bit an element later.

    Half of 1-bit Adam: the other half is the optimizer, ``OneBitAdam`` or ``OneBitLAMB``, whose
    ``compressor()`` makes this with the options that fit.  After ``freeze_step`` exchanges::

        x_i = beta1 u + (1 - beta1) g_i + residual_i     on each rank
        sent_i = scale_i * sign(x_i);  residual_i = x_i - sent_i
        u = 1-bit mean of sent_i                         on all ranks: the new momentum

    State: ``average`` u, equal on all ranks; ``residual`` and ``owner_residual``.

    Options:
        beta1: the optimizer's.
        freeze_step: a number of exchanges, 1 or more, or ``After("epoch", ...)``.
        norm: scale of the signs: "l1", mean |x|, or "l2", the norm over sqrt(d).
        min_size: tensors with fewer elements are summed whole; their momentum is exact.

    Reference: Tang et al., ICML 2021, arXiv 2102.02888.

    The gradient, and in the next step the momentum in one bit:

    >>> world = World(OneBitAdamCompression(beta1=0.5, freeze_step=1, min_size=1), size=1)
    >>> [world.exchange([np.array([4.0, -2.0])])[0].direction.tolist() for step in range(2)]
    [[4.0, -2.0], [2.25, -2.25]]
    """

    reference = "Tang et al., ICML 2021"

    beta1: float = 0.9
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
