"""Schedules of the weight of the distillation loss, and of the weight decay beside it."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from hvd_compress.config import (
    Configurable,
    as_tuple,
    check_between,
    check_whole,
    converted,
    is_number,
)
from hvd_compress.errors import ConfigError


class Weight(Configurable, abc.ABC, kind="distillation weight"):
    """A weight that changes with the step."""

    @abc.abstractmethod
    def at(self, step: int, burn_in: int) -> float:
        """Return the weight in a step, counted from 1, of which the first ``burn_in`` are without
        distillation."""


@dataclasses.dataclass(frozen=True)
class Ramp(Weight, name="ramp"):
    """A weight that rises from 0 to ``to`` by equal increments in ``steps`` steps after the
    burn-in, and stays there.

    Args:
        to: the weight in the end, 0 or more.
        steps: the number of steps of the rise.

    Raises:
        ConfigError: an option makes no sense.

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
        return self.to * min(1.0, (step - burn_in) / self.steps)


def _milestones(value: Any) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, list | tuple) else (value,)
    for step in found:
        check_whole("at_steps", step, 1)
    return found


@dataclasses.dataclass(frozen=True)
class Decay(Weight, name="decay"):
    """A weight that is ``start``, and is multiplied by ``factor`` after each of the steps
    ``at_steps``, for instance those at which the learning rate drops.

    Args:
        start, factor: 0 or more.
        at_steps: numbers of steps, from 1; none for a weight that stays.

    Raises:
        ConfigError: an option makes no sense.

    >>> weight = Decay(start=1.0, factor=0.5, at_steps=(10, 20))
    >>> [weight.at(step, burn_in=0) for step in (10, 11, 21)]
    [1.0, 0.5, 0.25]
    """

    start: float = 1.0
    factor: float = 0.1
    at_steps: tuple[int, ...] = dataclasses.field(default=(), metadata=converted(_milestones))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_between("start", self.start, 0)
        check_between("factor", self.factor, 0)

    def at(self, step: int, burn_in: int) -> float:
        return self.start * self.factor ** sum(step > drop for drop in self.at_steps)


@dataclasses.dataclass(frozen=True)
class WeightDecay(Configurable, kind="weight decay", name="weight_decay"):
    """The weight decay of the optimizers beside codistillation, which regularises itself: the first
    of ``values``, and the next one after each of the steps ``at_steps``, those at which the
    learning rate drops.

    Args:
        values: one more than there are ``at_steps``, each 0 or more.
        at_steps: numbers of steps, from 1, ascending.

    Raises:
        ConfigError: an option makes no sense.

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


def as_weight(value: Any) -> float | Weight:
    """Return a number that is 0 or more, or a schedule."""
    if isinstance(value, Weight):
        return value
    if not is_number(value) or not 0 <= value < float("inf"):
        raise ConfigError(
            "weight must be a number, 0 or more, or a schedule such as Ramp(to=1.0, steps=1000) or "
            f"Decay(start=1.0, factor=0.1, at_steps=(3000, 6000)); got {value!r}"
        )
    return float(value)
