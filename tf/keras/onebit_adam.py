"""1-bit Adam for Keras 3 (Tang et al., ICML 2021); its messages are ``methods/onebit_adam.py``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvd_compress.errors import ConfigError
from hvd_compress.methods.onebit_adam import OneBitAdamCompression, check_freeze_step
from hvd_compress.tensorflow.binding import Binding, native


@keras.saving.register_keras_serializable(package="hvd_compress")
class OneBitAdam(keras.optimizers.Optimizer):
    """Adam whose variance is frozen after ``freeze_step`` steps, so that momentum can travel in one
    bit an element::

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
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **options)
        if not all(0 <= beta < 1 for beta in (beta_1, beta_2)):
            raise ConfigError(f"beta_1 and beta_2 must be in [0, 1); got {beta_1} and {beta_2}")
        if not epsilon >= 0:
            raise ConfigError(f"epsilon must be 0 or more; got {epsilon!r}")
        check_freeze_step(freeze_step)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.freeze_step, self.bias_correction = freeze_step, bias_correction
        self._binding: Binding | None = None
        self._exchanged: frozenset[int] = frozenset()
        self._rows: frozenset[int] = frozenset()

    def compressor(self, **options: Any) -> OneBitAdamCompression:
        """The compression that goes with this optimizer; ``options`` are its ``norm`` and
        ``min_size``."""
        return OneBitAdamCompression(**self.compression_options(), **options)

    def compression_options(self) -> dict[str, Any]:
        """Those of the compression that the optimizer determines."""
        return {"beta1": self.beta_1, "freeze_step": self.freeze_step}

    def follow(self, binding: Binding, exchanged: Collection[int]) -> None:
        """``binding`` hands out momenta, once it has begun to, for the variables of those ids."""
        self._binding, self._exchanged = binding, frozenset(exchanged)

    def get_config(self) -> dict[str, Any]:
        own = ("beta_1", "beta_2", "epsilon", "freeze_step", "bias_correction")
        return super().get_config() | {name: getattr(self, name) for name in own}

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )
        self._variance_steps = self.add_variable((), "zeros", "int64", name="variance_steps")

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        variables = self._trainable_variables if trainable_variables is None else []
        variables = list(trainable_variables or variables)
        # Gradients of some rows travelled as they are.
        self._rows = frozenset(
            id(native(variable))
            for gradient, variable in zip(grads, variables, strict=True)
            if isinstance(gradient, tf.IndexedSlices)
        )
        super().apply(grads, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        place, key = self._get_variable_index(variable), id(native(variable))
        m, v = self._momentums[place], self._velocities[place]
        beta_1, beta_2 = self.beta_1, self.beta_2
        dtype = variable.dtype
        gradient = ops.cast(tf.convert_to_tensor(gradient), dtype)
        step, frozen = self.iterations + 1, self._is_frozen()

        momentum = beta_1 * m + (1 - beta_1) * gradient
        if key in self._exchanged and key not in self._rows:
            momentum = ops.where(frozen, gradient, momentum)
        m.assign(momentum)
        v.assign(ops.where(frozen, v, beta_2 * v + (1 - beta_2) * ops.square(gradient)))
        # Every variable says the same.
        count = ops.cast(step, "int64")
        self._variance_steps.assign(ops.where(frozen, self._variance_steps, count))

        variance = ops.convert_to_tensor(v)
        if self.bias_correction:
            momentum = momentum / _bias(beta_1, step, dtype)
            variance = variance / _bias(beta_2, ops.maximum(self._variance_steps, 1), dtype)
        update = momentum / (ops.sqrt(variance) + self.epsilon)
        # Where v is 0 there is no scale: see the class of PyTorch.
        update = ops.where(variance > 0, update, ops.zeros_like(update))
        variable.assign(variable - ops.cast(learning_rate, dtype) * update)

    def _is_frozen(self) -> Any:
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        if self._binding is None:
            return self.iterations >= self.freeze_step
        return self._binding.step.value() - 1 >= self.freeze_step


# The class of a distributed optimizer is made from this one, and is saved under its bare name.
keras.saving.get_custom_objects()["OneBitAdam"] = OneBitAdam


def _bias(beta: float, steps: Any, dtype: str) -> Any:
    return 1 - tf.pow(tf.constant(beta, dtype), ops.cast(steps, dtype))
