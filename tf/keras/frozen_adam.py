"""The base class of the optimizers that freeze Adam's variance, for Keras 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from keras import ops

from hvd_compress.errors import ConfigError

from .partner import PartnerOptimizer


class FrozenAdam(PartnerOptimizer):
    """Adam with its own compression.  Subclasses define in which steps its variance is updated."""

    def __init__(
        self,
        learning_rate: Any,
        beta_1: float,
        beta_2: float,
        epsilon: float,
        bias_correction: bool,
        weight_decay: float | None,
        name: str,
        options: Mapping[str, Any],
        **schedule: int,
    ) -> None:
        super().__init__(learning_rate, weight_decay, name, options, **schedule)
        if not all(0 <= beta < 1 for beta in (beta_1, beta_2)):
            raise ConfigError(f"beta_1 and beta_2 must be in [0, 1); got {beta_1} and {beta_2}")
        if not epsilon >= 0:
            raise ConfigError(f"epsilon must be 0 or more; got {epsilon!r}")
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.bias_correction = bias_correction
        self.compressor()  # checks these

    def get_config(self) -> dict[str, Any]:
        own = ("beta_1", "beta_2", "epsilon", "bias_correction")
        return super().get_config() | {name: getattr(self, name) for name in own}

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._momentums, self._velocities = self.add_optimizer_variables(
            variables, ["momentum", "velocity"]
        )
        self._variance_steps = self.add_variable((), "zeros", "int64", name="variance_steps")

    def _momentum_bias(self, steps: Any, dtype: str) -> Any:
        """Return the number by which Adam divides momentum after so many steps."""
        return bias_of(self.beta_1, steps, dtype) if self.bias_correction else tf.ones((), dtype)

    def _scale(self, velocity: Any) -> Any:
        """Return sqrt(v^) + epsilon, by which momentum is divided; infinite where v is 0, and
        nothing is known: see the class of PyTorch."""
        v = ops.convert_to_tensor(velocity)
        corrected = v
        if self.bias_correction:
            corrected = v / bias_of(self.beta_2, ops.maximum(self._variance_steps, 1), v.dtype)
        return tf.where(
            v > 0, tf.sqrt(corrected) + self.epsilon, tf.constant(float("inf"), v.dtype)
        )


def bias_of(beta: float, steps: Any, dtype: Any) -> Any:
    """Return 1 - beta^steps; in half precision 0.999 would be 1."""
    bias = 1 - tf.pow(tf.constant(beta, tf.float64), tf.cast(steps, tf.float64))
    return tf.cast(bias, dtype)
