"""Learning rates of large batches for Keras 3."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from hvd_compress.optimizers.scaling import check_steps, rate_factor


@keras.saving.register_keras_serializable(package="hvd_compress")
class ScaledWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises to that of a larger batch, by equal increments in every step::

        rate = hvd.ScaledWarmup(
            0.1, batch_size=32 * hvd.size(), reference_batch_size=256, steps=2000
        )
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))

    It goes before any schedule, whose steps count from the first one.  Keras's SGD has the rate
    inside of the velocity, so a rate that rises lags by about 1 / (1 - m) steps.

    Args:
        learning_rate: that suits ``reference_batch_size``; a number or a schedule.
        batch_size: examples of all ranks in one step.
        reference_batch_size: examples of a step that ``learning_rate`` was found for.
        steps: that the warm-up takes; 0 for none.
        scaling: "linear" or "sqrt"; see ``hvd_compress.optimizers.rate_factor``.
        name: of the schedule.

    Reference: Goyal et al., 2017, arXiv 1706.02677.

    >>> rate = hvd.ScaledWarmup(0.1, batch_size=1024, reference_batch_size=256, steps=2)
    >>> [round(float(rate(step)), 3) for step in range(4)]
    [0.1, 0.25, 0.4, 0.4]
    """

    def __init__(
        self,
        learning_rate: Any,
        batch_size: int,
        reference_batch_size: int,
        steps: int,
        scaling: str = "linear",
        name: str = "scaled_warmup",
    ) -> None:
        self.factor = rate_factor(batch_size, reference_batch_size, scaling)
        check_steps(steps)
        self.learning_rate, self.name = learning_rate, name
        self.batch_size, self.reference_batch_size = batch_size, reference_batch_size
        self.steps, self.scaling = steps, scaling

    def __call__(self, step: Any) -> Any:
        rate = self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate
        progress = ops.minimum(ops.cast(step, "float32") / max(self.steps, 1), 1.0)
        start = min(1.0, self.factor) if self.steps else self.factor
        return rate * (start + (self.factor - start) * progress)

    def get_config(self) -> dict[str, Any]:
        own = ("batch_size", "reference_batch_size", "steps", "scaling", "name")
        rate = keras.saving.serialize_keras_object(self.learning_rate)
        return {"learning_rate": rate, **{name: getattr(self, name) for name in own}}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ScaledWarmup:
        rate = keras.saving.deserialize_keras_object(config["learning_rate"])
        return cls(**{**config, "learning_rate": rate})
