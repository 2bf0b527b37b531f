"""1-bit Adam for Keras 3 (Tang et al., ICML 2021); its messages are ``methods/onebit_adam.py``."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvd_compress.methods.onebit_adam import OneBitAdamCompression, check_freeze_step

from ..binding import native
from .frozen_adam import FrozenAdam


@keras.saving.register_keras_serializable(package="hvd_compress")
class OneBitAdam(FrozenAdam):
    """Adam whose variance is frozen after ``freeze_step`` steps, so that momentum can be sent in
    one bit an element::

        adam = hvd.OneBitAdam(1e-3, freeze_step=2000)
        optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())

    Formula, state and deviations are those of :class:`hvd_compress.torch.OneBitAdam`; the
    number of updates is counted for all variables together.

    Args:
        learning_rate, beta_1, beta_2, epsilon: of Adam; ``epsilon`` is added to the root of the
            corrected variance.
        freeze_step: so many steps update the variance.
        bias_correction: as in Adam.
        weight_decay: decoupled from the gradient, as in AdamW.
        options: of every Keras optimizer.

    Raises:
        ConfigError: an option makes no sense.
    """

    method = OneBitAdamCompression
    schedule = ("freeze_step",)

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        weight_decay: float | None = None,
        name: str = "onebit_adam",
        **options: Any,
    ) -> None:
        # The compression alone would take epochs as well.
        check_freeze_step(freeze_step)
        super().__init__(
            *(learning_rate, beta_1, beta_2, epsilon, bias_correction, weight_decay, name, options),
            freeze_step=freeze_step,
        )
        self._rows: frozenset[int] = frozenset()

    def compression_options(self) -> dict[str, Any]:
        return {"beta1": self.beta_1, **super().compression_options()}

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        variables = self._trainable_variables if trainable_variables is None else []
        variables = list(trainable_variables or variables)
        # Sparse gradients were sent uncompressed.
        self._rows = frozenset(
            id(native(variable))
            for gradient, variable in zip(grads, variables, strict=True)
            if isinstance(gradient, tf.IndexedSlices)
        )
        super().apply(grads, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        update = self._direction(gradient, variable, self._is_frozen())
        variable.assign(variable - ops.cast(learning_rate, variable.dtype) * update)

    def _direction(self, gradient: Any, variable: Any, frozen: Any) -> Any:
        """Return the direction of Adam's step, after an update of its state.

        Args:
            frozen: the variance stays as it is, and what is averaged is a momentum.
        """
        place, key = self._get_variable_index(variable), id(native(variable))
        m, v = self._momentums[place], self._velocities[place]
        dtype = variable.dtype
        gradient = ops.cast(tf.convert_to_tensor(gradient), dtype)
        step = self.iterations + 1

        momentum = self.beta_1 * m + (1 - self.beta_1) * gradient
        if key in self._places and key not in self._rows:
            momentum = ops.where(frozen, gradient, momentum)
        m.assign(momentum)
        new = self.beta_2 * v + (1 - self.beta_2) * ops.square(gradient)
        v.assign(ops.where(frozen, v, new))
        # Every variable says the same.
        count = ops.cast(step, "int64")
        self._variance_steps.assign(ops.where(frozen, self._variance_steps, count))
        return momentum / self._momentum_bias(step, dtype) / self._scale(v)

    def _is_frozen(self) -> Any:
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        if self._binding is None:
            return self.iterations >= self.freeze_step
        return self._binding.step.value() - 1 >= self.freeze_step


# The class of a distributed optimizer is made from this one, and is saved under its bare name.
keras.saving.get_custom_objects()["OneBitAdam"] = OneBitAdam
