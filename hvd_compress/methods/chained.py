"""Bases of the methods that are chains of blocks."""

from __future__ import annotations

import functools
import math

from hvd_compress.base import Array, Compressor, Context, Encoded, Exchange, Place, State
from hvd_compress.chain import Chain, Transform, chain
from hvd_compress.config import Configurable, numbers
from hvd_compress.errors import ConfigError
from hvd_compress.meetings.allreduce import allreduce
from hvd_compress.transforms import (
    error_feedback,
    momentum_after_averaging,
    momentum_correction,
)

check_min_size = numbers("a number of elements", lambda n: n >= 0, whole=True)


class Chained(Compressor):
    """A method that is a chain of blocks.  Its options make ``blocks``, or ``chain`` is overridden
    and chooses a chain for each tensor or step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Blocks check the options.
        if self.blocks is None and type(self).chain is Chained.chain:
            raise ConfigError(
                f"{type(self).__name__} has no blocks: write a property blocks that returns a "
                "chain, or a method chain(gradient, context) that chooses one"
            )

    @functools.cached_property
    def blocks(self) -> Chain | None:
        """The chain of all tensors and steps, if there is one for all."""
        return None

    def chain(self, gradient: Array, context: Context) -> Chain:
        assert self.blocks is not None
        return self.blocks

    def template(self, gradient: Array) -> Chain:
        return self.chain(gradient, Context())

    @property
    def working_parts(self) -> list[Configurable]:
        return self.parts if self.blocks is None else [self.blocks]

    @property
    def is_steady(self) -> bool:  # type: ignore[override]
        # One that chooses its chain knows itself whether it chooses by more than a schedule.
        if self.blocks is None or type(self).chain is not Chained.chain:
            return False
        return self.blocks.is_steady

    def init(self, gradient: Array) -> State:
        return self.template(gradient).init(gradient)

    def common(self, gradient: Array) -> State:
        return self.template(gradient).common(gradient)

    def per_rank(self, gradient: Array) -> frozenset[str]:
        return self.template(gradient).per_rank(gradient)

    def repaired(self, gradient: Array, state: State) -> State:
        return self.template(gradient).repaired(gradient, state)

    def exchange(self, gradient: Array, state: State, context: Context) -> Exchange:
        return self.chain(gradient, context).exchange(gradient, state, context)

    def place(self, gradient: Array, context: Context) -> Place | None:
        if type(self).exchange is not Chained.exchange:  # which may do more than its chain
            return None
        return self.chain(gradient, context).place(gradient, context)

    def encode(self, gradient: Array, state: State, context: Context) -> Encoded:
        return self.chain(gradient, context).encode(gradient, state, context)

    def decode(self, message: Array, like: Array, context: Context) -> Array:
        return self.chain(like, context).decode(message, like, context)


class OfVelocities(Chained):
    """The base of methods that send the largest elements of accumulated velocities of matrices.
    They apply the optimizer's momentum themselves.  One-dimensional and tiny tensors are averaged
    in full, with momentum afterwards.

    Subclasses have the options ``momentum``, ``nesterov``, ``masking`` and ``min_size``.
    """

    momentum: float | None
    nesterov: bool | None
    masking: bool
    min_size: int

    is_coarse = True

    @property
    def working_parts(self) -> list[Configurable]:
        return [self._whole]

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of that shape is ever sent in part."""
        return len(shape) > 1 and math.prod(shape) >= max(self.min_size, 1)

    @property
    def _before(self) -> tuple[Transform, ...]:
        return ()

    @property
    def _feedback(self) -> Transform:
        return error_feedback()

    def accumulated(self, masking: bool) -> tuple[Transform, ...]:
        """Return the transforms of a velocity.  ``masking=False`` is for a step in which everything
        is sent: to mask everything would turn momentum off."""
        correct = momentum_correction(self.momentum, self.nesterov, masking)
        return (*self._before, correct, self._feedback)

    @functools.cached_property
    def _everything(self) -> Chain:
        return chain(*self.accumulated(masking=False), via=allreduce())

    @functools.cached_property
    def _whole(self) -> Chain:
        after = momentum_after_averaging(self.momentum, self.nesterov)
        return chain(*self._before, after, via=allreduce("gradient"))
