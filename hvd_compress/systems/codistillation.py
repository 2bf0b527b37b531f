"""Codistillation with its options, and schedules of the distillation loss and of weight decay.

References: Anil et al., 2018; Sodhani et al., 2020.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hvd_compress.config import (
    Configurable,
    as_tuple,
    check_between,
    check_choice,
    check_whole,
    checked,
    converted,
    is_number,
)
from hvd_compress.errors import ConfigError
from hvd_compress.systems.base import check_groups
from hvd_compress.systems.counterparts import Counterparts
from hvd_compress.systems.distillation import LOSSES

EXCHANGES = ("checkpoints", "predictions")


@dataclasses.dataclass(frozen=True)
class Ramp(Configurable, kind="distillation weight", name="ramp"):
    """A weight that rises from 0 to ``to`` by equal increments in ``steps`` steps after the
    burn-in, and stays there.

    Args:
        to: the weight in the end, 0 or more.
        steps: the number of steps of the rise.

    >>> [Ramp(to=1.0, steps=4).at(step, burn_in=10) for step in (11, 12, 14, 20)]
    [0.25, 0.5, 1.0, 1.0]
    """

    to: float = 1.0
    steps: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("to", self.to, 0)
        check_whole("steps", self.steps, 1)

    def at(self, step: int, burn_in: int) -> float:
        """Return the weight in a step, counted from 1, of which the first ``burn_in`` are without
        distillation."""
        return self.to * min(1.0, (step - burn_in) / self.steps)


def _milestones(value: Any) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    for step in found:
        check_whole("at_steps", step, 1)
    return found


@dataclasses.dataclass(frozen=True)
class WeightDecay(Configurable, kind="weight decay", name="weight_decay"):
    """The weight decay of the optimizers during codistillation, which regularises itself.

    It is the first of ``values``, and the next one after each of the steps ``at_steps``.

    Args:
        values: one more than there are ``at_steps``, each 0 or more.
        at_steps: numbers of steps, from 1, ascending, such as those at which the learning rate
            drops.

    >>> decay = WeightDecay(at_steps=(3000, 6000))
    >>> [decay.at(step) for step in (3000, 3001, 6001)]
    [0.0005, 1e-05, 0.0]

    Reference: Sodhani et al., 2020, who lower it, and lower it again when the learning rate drops.
    The default values are recalled.
    """

    values: tuple[float, ...] = (5e-4, 1e-5, 0.0)
    at_steps: tuple[int, ...] = dataclasses.field(default=(), metadata=converted(_milestones))

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "values", as_tuple("values")(self.values))
        for value in self.values:
            check_between("values", value, 0)
        if len(self.values) != len(self.at_steps) + 1 or [*self.at_steps] != sorted(self.at_steps):
            raise ConfigError(
                f"WeightDecay needs a step in at_steps, ascending, for each of values but the "
                f"first; got values={self.values!r}, at_steps={self.at_steps!r}"
            )

    def at(self, step: int) -> float:
        """Return the weight decay in a step, counted from 1."""
        return self.values[sum(step > drop for drop in self.at_steps)]


def as_weight(value: Any) -> float | Ramp:
    """Return a number that is 0 or more, or a schedule."""
    if isinstance(value, Ramp):
        return value
    if not is_number(value) or not 0 <= value < float("inf"):
        raise ConfigError(
            "weight must be a number, 0 or more, or a schedule such as Ramp(to=1.0, steps=1000); "
            f"got {value!r}"
        )
    return float(value)


@dataclasses.dataclass(frozen=True)
class Codistillation(Configurable, kind="codistillation", name="codistillation"):
    """Train a model per rank or group, and let the models teach each other::

        codistillation = hvd.Codistillation(model, exchange="checkpoints", every=50, burn_in=1000)

    The loss after the burn-in, with the gradient through the own prediction only::

        loss_i = task loss_i + alpha D(F(x; theta_i), mean of F(x; theta_j) over the others j)

    Args:
        exchange: "checkpoints" sends models, which predict on a rank's own batch; "predictions"
            sends those on the batch that all ranks have.  NaN or Inf is left out of the mean.
        every: T steps between exchanges; ``None``: 50 with checkpoints, 1 with predictions.
        burn_in: the number of first steps without distillation.
        weight: alpha, a number or a schedule, :class:`Ramp`.
        loss: D, "kl" or "mse".
        groups: the number of ranks that train one model; ``None``: a model per rank.
        values: "float16" to send floats in 16 bits; ``None`` for their own dtype.
        weight_decay: a :class:`WeightDecay`, of the optimizers; ``None`` to leave theirs alone.

    Reference: Anil et al., ICLR 2018; Sodhani et al., 2020.

    >>> Codistillation(every=50, burn_in=100, weight=0.5).weight_at(step=101)
    0.5
    """

    exchange: str = "checkpoints"
    every: int | None = None
    burn_in: int = 0
    weight: float | Ramp = dataclasses.field(default=1.0, metadata=converted(as_weight))
    loss: str = "kl"
    groups: int | None = checked(check_groups, None)
    values: str | None = None
    weight_decay: WeightDecay | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("exchange", self.exchange, EXCHANGES)
        if self.every is not None:
            check_whole("every", self.every, 1)
        check_whole("burn_in", self.burn_in, 0)
        check_choice("loss", self.loss, tuple(LOSSES))
        check_choice("values", self.values, (None, "float16"))
        if self.weight_decay is not None and not isinstance(self.weight_decay, WeightDecay):
            raise ConfigError(
                "weight_decay must be WeightDecay(values=(5e-4, 1e-5, 0.0), at_steps=(3000, 6000)) "
                f"or None; got {self.weight_decay!r}"
            )

    @property
    def period(self) -> int:
        """T."""
        return self.every or (50 if self.exchange == "checkpoints" else 1)

    def weight_at(self, step: int) -> float:
        """Return alpha in a step, counted from 1; 0 during the burn-in."""
        if step <= self.burn_in:
            return 0.0
        return self.weight if isinstance(self.weight, float) else self.weight.at(step, self.burn_in)

    def is_due(self, step: int) -> bool:
        """Return whether an exchange begins in a step: those after the burn-in, whatever the
        weight, so that teachers are there when it rises."""
        return step > self.burn_in and (step - self.burn_in - 1) % self.period == 0

    def counterparts(self, rank: int, size: int) -> Counterparts:
        """Return with whom a rank exchanges, given the number of ranks.

        Raises:
            ConfigError: the groups differ in size, so that ranks
                that exchange predictions could not have the same batches.
        """
        if self.exchange == "predictions" and size % (self.groups or 1):
            raise ConfigError(
                f"groups={self.groups!r} of {size} ranks differ in size: ranks that exchange "
                "predictions have the same batch, as they have the same place in their groups; "
                "make groups of equal size, or use exchange='checkpoints'"
            )
        return Counterparts.of(self.groups or 1, rank, size)
