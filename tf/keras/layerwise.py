"""LARS and LAMB for Keras 3; their formulas are those of ``training/large_batch/layerwise.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from hvd_compress.errors import ConfigError
from hvd_compress.training.large_batch.scaling import check_not_negative

from .frozen_adam import bias_of


def norm_of(x: Any) -> Any:
    """Return the norm, in float32 of half precisions, whose largest number it may pass."""
    wide = ops.cast(x, "float32") if x.dtype.size < 4 else x
    return ops.sqrt(ops.sum(ops.square(wide)))


def quotient(numerator: Any, denominator: Any, first: Any, second: Any) -> Any:
    """Return the quotient, 1 where one of the norms is 0."""
    positive = ops.logical_and(first > 0, second > 0)
    return ops.where(positive, numerator / ops.where(positive, denominator, 1.0), 1.0)


class Layerwise(keras.optimizers.Optimizer):
    """Weight decay is a part of the step, and not taken before it as other optimizers do."""

    def _apply_weight_decay(self, variables: Any) -> None:
        pass

    def _decay(self, variable: Any) -> float:
        use = self.weight_decay and self._use_weight_decay(variable)
        return self.weight_decay if use else 0.0


@keras.saving.register_keras_serializable(package="hvd_compress")
class LARS(Layerwise):
    """SGD with momentum whose learning rate follows the norms of each layer::

        optimizer = hvd.DistributedOptimizer(hvd.LARS(3.2, weight_decay=1e-4), compression="topk")

    Formula and reference are those of :class:`hvd_compress.torch.LARS`.

    Args:
        learning_rate: global; a number or a schedule.
        momentum: m.
        weight_decay: inside the step; ``exclude_from_weight_decay`` works as ever.
        trust_coefficient: length of a step beside the weights, at learning rate 1.
        options: of every Keras optimizer.

    Raises:
        ConfigError: an option makes no sense.
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        weight_decay: float | None = None,
        trust_coefficient: float = 0.001,
        name: str = "lars",
        **options: Any,
    ) -> None:
        check_not_negative(
            momentum=momentum,
            weight_decay=weight_decay or 0.0,
            trust_coefficient=trust_coefficient,
        )
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **options)
        self.momentum, self.trust_coefficient = momentum, trust_coefficient

    def get_config(self) -> dict[str, Any]:
        own = {"momentum": self.momentum, "trust_coefficient": self.trust_coefficient}
        return super().get_config() | own

    def build(self, variables: Sequence[Any]) -> None:
        if not self.built:
            super().build(variables)
            self._velocities = self.add_optimizer_variables(variables, "velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        w = ops.convert_to_tensor(variable)
        gradient, rate = ops.cast(gradient, w.dtype), ops.cast(learning_rate, w.dtype)
        velocity = self._velocities[self._get_variable_index(variable)]
        if len(w.shape) > 1:
            decay, norm_w, norm_g = self._decay(variable), norm_of(w), norm_of(gradient)
            local = quotient(
                self.trust_coefficient * norm_w, norm_g + decay * norm_w, norm_w, norm_g
            )
            rate *= ops.cast(local, w.dtype)
            gradient += decay * w
        velocity.assign(self.momentum * velocity + rate * gradient)
        variable.assign(w - velocity)


@keras.saving.register_keras_serializable(package="hvd_compress")
class LAMB(Layerwise):
    """Adam whose steps are as long as each layer's weights, times the learning rate::

        optimizer = hvd.DistributedOptimizer(hvd.LAMB(2e-3, weight_decay=0.01), compression="topk")

    Formula and reference are those of :class:`hvd_compress.torch.LAMB`.  ``keras.optimizers.Lamb``
    takes the same steps without weight decay; it decays weights beside the step, where the paper
    has decay inside of the direction whose norm is taken.

    Args:
        learning_rate: a number or a schedule.
        beta_1, beta_2, epsilon: of Adam.
        weight_decay: inside the step; ``exclude_from_weight_decay`` works as ever.
        options: of every Keras optimizer.

    Raises:
        ConfigError: an option makes no sense.
    """

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float | None = None,
        name: str = "lamb",
        **options: Any,
    ) -> None:
        check_not_negative(epsilon=epsilon, weight_decay=weight_decay or 0.0)
        if not all(0 <= beta < 1 for beta in (beta_1, beta_2)):
            raise ConfigError(f"beta_1 and beta_2 must be in [0, 1); got {beta_1} and {beta_2}")
        super().__init__(learning_rate, weight_decay=weight_decay, name=name, **options)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon

    def get_config(self) -> dict[str, Any]:
        own = {"beta_1": self.beta_1, "beta_2": self.beta_2, "epsilon": self.epsilon}
        return super().get_config() | own

    def build(self, variables: Sequence[Any]) -> None:
        if not self.built:
            super().build(variables)
            self._momentums, self._velocities = self.add_optimizer_variables(
                variables, ["momentum", "velocity"]
            )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        w, place = ops.convert_to_tensor(variable), self._get_variable_index(variable)
        gradient, rate = ops.cast(gradient, w.dtype), ops.cast(learning_rate, w.dtype)
        m, v = self._momentums[place], self._velocities[place]
        m.assign(self.beta_1 * m + (1 - self.beta_1) * gradient)
        v.assign(self.beta_2 * v + (1 - self.beta_2) * ops.square(gradient))
        step = self.iterations + 1
        corrected = [
            x / bias_of(beta, step, w.dtype) for x, beta in ((m, self.beta_1), (v, self.beta_2))
        ]
        u = corrected[0] / (ops.sqrt(corrected[1]) + self.epsilon) + self._decay(variable) * w
        norm_w, norm_u = norm_of(w), norm_of(u)
        ratio = ops.cast(quotient(norm_w, norm_u, norm_w, norm_u), w.dtype)
        variable.assign(w - rate * ratio * u)


# The class of a distributed optimizer is made from these, and is saved under their bare names.
keras.saving.get_custom_objects().update(LARS=LARS, LAMB=LAMB)
