"""Densities that change during training: schedules map (step, epoch) to the fraction that is sent::

    compression=hvd.DGC(density=hvd.warmup_to(0.001, epochs=4))

Early gradients change fast and residuals become stale, so 0.1 % from the first step on costs
accuracy.  Lin et al. (ICLR 2018) therefore lower the density in stages while the learning rate
warms up.

Stages are counted in steps (``unit="step"``) or epochs (``unit="epoch"``).  Epochs need
``compression.set_epoch(epoch)`` once per epoch, and raise ``ConfigError`` without.  Stages shorter
than an epoch advance within it if its parts are announced too, as ``set_epoch(epoch + batch /
batches)``.  Otherwise the first stage of an epoch lasts until its end.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

from hvd_compress.config import (
    Configurable,
    as_tuple,
    check_fraction,
    checked,
    choice,
    converted,
    is_number,
    is_whole,
    numbers,
)
from hvd_compress.errors import ConfigError

#: densities of the paper's warm-up stages: sparsity 75, 93.75, 98.4375, 99.6, 99.9 %
PAPER_DENSITIES = (0.25, 0.0625, 0.015625, 0.004, 0.001)


@dataclasses.dataclass(frozen=True)
class _Staged(Configurable, abc.ABC, kind="schedule"):
    unit: str = choice("step", "epoch")
    stage_length: float = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.stage_length
        if not is_number(length) or not length > 0:
            raise ConfigError(
                f"stage_length must be a positive number of {self.unit}s; got {length!r}"
            )

    @property
    def needs_epoch(self) -> bool:
        return self.unit == "epoch"

    @property
    @abc.abstractmethod
    def values(self) -> tuple[Any, ...]:
        """The value of each stage; the last one never ends."""

    def __call__(self, step: int, epoch: float | None = None) -> Any:
        if self.unit == "epoch" and epoch is None:
            raise ConfigError(
                f"{type(self).__name__}(unit='epoch') does not know the epoch: call "
                "compression.set_epoch(epoch) at the start of every epoch, or use unit='step'"
            )
        count = step if self.unit == "step" or epoch is None else epoch
        stage = int(count / self.stage_length + 1e-9)  # 1e-9: thirds are not exact
        return self.values[min(stage, len(self.values) - 1)]


@dataclasses.dataclass(frozen=True)
class StagedWarmup(_Staged, name="staged"):
    """A schedule with one density for each stage; the last one never ends::

        compression=hvd.TopK(density=hvd.StagedWarmup(stage_length=500, densities=(0.1, 0.01)))

    The default densities are those of Lin et al. (2018): 25, 6.25, 1.5625, 0.4 and 0.1 %.  A
    density of 1.0 makes a dense stage.

    Options:
        unit: "step" or "epoch"; epochs must be announced, ``compression.set_epoch(epoch)``.
        stage_length: of each stage, in these; more than 0, and may be a part of an epoch.
        densities: one for each stage, in (0, 1].

    >>> schedule = StagedWarmup(stage_length=100, densities=(0.25, 0.01))
    >>> schedule(step=99), schedule(step=100), schedule(step=5000)
    (0.25, 0.01, 0.01)
    """

    densities: tuple[float, ...] = dataclasses.field(
        default=PAPER_DENSITIES, metadata=converted(as_tuple("densities"))
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.densities:
            raise ConfigError("densities must not be empty; the paper's are the default")
        for density in self.densities:
            check_fraction("densities", density)

    @property
    def values(self) -> tuple[float, ...]:
        return self.densities


@dataclasses.dataclass(frozen=True)
class ExponentialWarmup(_Staged, name="exponential"):
    """A schedule of equal ratios: ``density ** ((stage + 1) / (stages + 1))``, then ``density``::

        compression=hvd.DGC(density=hvd.ExponentialWarmup(unit="epoch"))

    With 5 stages and density 0.001 it is the default of the released code of Deep Gradient
    Compression: 0.3162, 0.1, 0.03162, 0.01, 0.003162, 0.001.  Their paper has another list.

    Options:
        unit, stage_length: see :class:`StagedWarmup`.
        density: of the end, in (0, 1].
        stages: before it, 0 or more.

    >>> schedule = ExponentialWarmup(unit="epoch", density=0.001, stages=2)
    >>> [round(schedule(step=0, epoch=epoch), 4) for epoch in range(4)]
    [0.1, 0.01, 0.001, 0.001]
    """

    density: float = checked(check_fraction, 0.001)
    stages: int = checked(numbers("a number of stages, 0 or more", lambda n: n >= 0, whole=True), 5)

    @property
    def values(self) -> tuple[float, ...]:
        number = self.stages + 1
        return tuple(float(self.density ** (stage / number)) for stage in range(1, number + 1))


def warmup_to(
    density: float, *, steps: int | None = None, epochs: int | None = None
) -> StagedWarmup:
    """Return a warm-up of the density in the stages of Lin et al. (2018), from 25 % down to
    ``density``::

        compression=hvd.DGC(density=hvd.warmup_to(0.001, epochs=4))

    Args:
        density: of the end, in (0, 1].
        steps, epochs: the length of the warm-up, one of the two; 0 for none.

    >>> schedule = warmup_to(0.01, epochs=3)
    >>> [schedule(step=0, epoch=epoch) for epoch in range(5)]
    [0.25, 0.0625, 0.015625, 0.01, 0.01]
    """
    check_fraction("density", density)
    if (steps is None) == (epochs is None):
        raise ConfigError("warmup_to needs its length: steps=... or epochs=..., one of the two")
    length = steps if epochs is None else epochs
    if not is_whole(length) or length < 0:
        raise ConfigError(f"the length of the warm-up must be 0 or more; got {length!r}")
    stages = [d for d in PAPER_DENSITIES if d > density] if length else []
    stage_length = length / len(stages) if stages else 1
    if stage_length == int(stage_length):
        stage_length = int(stage_length)
    unit = "step" if epochs is None else "epoch"
    return StagedWarmup(unit, stage_length, (*stages, density))


@dataclasses.dataclass(frozen=True)
class After(_Staged, name="after"):
    """A schedule of a beginning: False for the first steps or epochs, then True::

        compression=hvd.PowerSGD(rank=4, start=hvd.After("epoch", 2))

    Options:
        unit: "step" or "epoch"; epochs must be announced, ``compression.set_epoch(epoch)``.
        stage_length: a positive number of these.

    >>> start = After(unit="epoch", stage_length=2)
    >>> start(step=500, epoch=1.5), start(step=900, epoch=2)
    (False, True)
    """

    values = (False, True)


Schedule = StagedWarmup | ExponentialWarmup | After
Density = float | StagedWarmup | ExponentialWarmup
#: when something begins: at once (True), never (False), or after a number of steps
Start = bool | int | After


def as_start(value: Any) -> bool | After:
    """Return a bool, or a schedule that is false before it begins; a number counts steps."""
    if isinstance(value, bool | After):
        return value
    if not is_whole(value) or value < 0:
        raise ConfigError(f"start must be a number of steps, 0 or more; got {value!r}")
    return After("step", value) if value else True


def started(start: Start, step: int, epoch: float | None) -> bool:
    return start(step, epoch) if isinstance(start, After) else bool(start)


def as_density(value: Any) -> Density:
    """Return a fraction or a schedule, or raise ``ConfigError``."""
    if isinstance(value, StagedWarmup | ExponentialWarmup):
        return value
    check_fraction("density", value)
    return float(value)


def density_at(density: Density, step: int, epoch: float | None) -> float:
    return density if isinstance(density, float) else density(step, epoch)


def schedules_of(thing: Configurable) -> list[Schedule]:
    """Return the schedules in the options of a method, at any depth, each of them once."""
    if isinstance(thing, _Staged):
        return [thing]  # type: ignore[list-item]
    found: list[Schedule] = []
    for part in thing.parts:
        found += [schedule for schedule in schedules_of(part) if schedule not in found]
    return found


def with_values(thing: Any, values: Mapping[Any, Any]) -> Any:
    """Return a copy of a method in which every schedule is replaced by its value in ``values``."""
    if isinstance(thing, _Staged):
        return values[thing]
    if isinstance(thing, tuple):
        return tuple(with_values(part, values) for part in thing)
    if isinstance(thing, Configurable):
        names = [field.name for field in dataclasses.fields(thing)]  # type: ignore[arg-type]
        options = {name: with_values(getattr(thing, name), values) for name in names}
        return dataclasses.replace(thing, **options)  # type: ignore[type-var]
    return thing
