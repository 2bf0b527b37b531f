"""Codistillation with its options (Anil et al., 2018; Sodhani et al., 2020)."""

from __future__ import annotations

import dataclasses
import functools

from hvd_compress.config import Configurable, check_choice, check_whole, converted
from hvd_compress.errors import ConfigError
from hvd_compress.systems.base import Groups, checked_groups, groups_of
from hvd_compress.systems.teachers.exchanges import Counterparts
from hvd_compress.systems.teachers.losses import LOSSES
from hvd_compress.systems.teachers.weights import Weight, WeightDecay, as_weight

EXCHANGES = ("checkpoints", "predictions")

_checked_groups = functools.partial(checked_groups, otherwise="a model on each rank")


@dataclasses.dataclass(frozen=True)
class Codistillation(Configurable, kind="codistillation", name="codistillation"):
    """Models i that are trained at the same time, and teach each other::

        loss_i = task loss_i + alpha D(F(x; theta_i), mean of F(x; theta_j) over the others j)

    in steps after the burn-in; the gradient goes through the model's own prediction only.

    With ``exchange="checkpoints"`` models are sent to each other every T = ``every`` steps, first
    after the burn-in.  A rank keeps those that it received, one of each other model, and predicts
    with them, in inference mode, on its own batch: the ranks' batches may differ.  Sent: the
    floating-point parameters and buffers of a model, once for each rank that learns from it.

    With ``exchange="predictions"`` all have the same batch, and send their predictions on it; in
    every step, or in each T-th, and the other steps are without distillation.

    Teachers whose predictions are NaN or Inf are left out of the mean in that step; if none is
    left, the loss is the task's.

    Args:
        exchange: "checkpoints" or "predictions".
        every: T; ``None`` for 50 with checkpoints and 1 with predictions.
        burn_in: the number of steps without distillation in the beginning.
        weight: alpha, a number or a schedule: :class:`Ramp` or :class:`Decay`.
        loss: D, "cross_entropy", "kl", "reverse_kl" or "mse"; see
            :mod:`hvd_compress.systems.teachers.losses`.
        groups: lists of ranks, or the number of ranks that make a group; the ranks of a group have
            one model, which they train data parallel.  ``None`` for a model on each rank.
        values: "float16" to send floats in 16 bits; ``None`` for their own dtype.
        delay: the number of steps that an exchange of checkpoints may travel, less than T, while
            the previous ones are used; teachers are at most T - 1 + ``delay`` steps old.
        weight_decay: a :class:`WeightDecay`, of the optimizers; ``None`` to leave theirs alone.

    Differs from the papers in: predictions may be exchanged in every T-th step only; 16 bits on the
    wire; a warm start of the weight.

    Reference: Anil et al., ICLR 2018; Sodhani et al., 2020.

    Of the options alone, with steps counted from 1:

    >>> from hvd_compress.systems.teachers import Codistillation
    >>> method = Codistillation(every=50, burn_in=100, weight=0.5)
    >>> [(step, method.is_due(step), method.weight_at(step)) for step in (100, 101, 102, 151)]
    [(100, False, 0.0), (101, True, 0.5), (102, False, 0.5), (151, True, 0.5)]
    """

    exchange: str = "checkpoints"
    every: int | None = None
    burn_in: int = 0
    weight: float | Weight = dataclasses.field(default=1.0, metadata=converted(as_weight))
    loss: str = "kl"
    groups: Groups | int | None = dataclasses.field(
        default=None, metadata=converted(_checked_groups)
    )
    values: str | None = None
    delay: int = 0
    weight_decay: WeightDecay | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("exchange", self.exchange, EXCHANGES)
        if self.every is not None:
            check_whole("every", self.every, 1)
        check_whole("burn_in", self.burn_in, 0)
        check_choice("loss", self.loss, tuple(LOSSES))
        check_choice("values", self.values, (None, "float16"))
        check_whole("delay", self.delay, 0)
        if self.weight_decay is not None and not isinstance(self.weight_decay, WeightDecay):
            raise ConfigError(
                "weight_decay must be WeightDecay(values=(5e-4, 1e-5, 0.0), at_steps=(3000, 6000)) "
                f"or None; got {self.weight_decay!r}"
            )
        if self.delay and self.exchange == "predictions":
            raise ConfigError(
                "delay is for exchange='checkpoints': predictions are needed in the step that they "
                "are of; leave it out"
            )
        if self.delay >= self.period:
            raise ConfigError(
                f"delay={self.delay} must be less than every={self.period}, so that one exchange "
                "ends before the next begins"
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
        """Return with whom a rank of so many exchanges.

        Raises:
            ConfigError: the groups are not of so many ranks; or differ in size, so that ranks that
                exchange predictions could not have the same batches.
        """
        groups = groups_of(1 if self.groups is None else self.groups, size)
        if self.exchange == "predictions" and len(set(map(len, groups))) > 1:
            raise ConfigError(
                f"groups={self.groups!r} of {size} ranks differ in size: ranks that exchange "
                "predictions have the same batch, as they have the same place in their groups; "
                "make groups of equal size, or use exchange='checkpoints'"
            )
        return Counterparts.of(groups, rank)
