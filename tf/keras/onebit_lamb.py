"""1-bit LAMB for Keras 3 (Li, Awan, Tang, Rajbhandari, He; 2021, arXiv 2104.06069); its messages
are those of 1-bit Adam: ``methods/onebit_adam.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from hvd_compress.methods.onebit_adam import check_coefficients

from ..binding import native
from .layerwise import Layerwise, norm_of, quotient
from .onebit_adam import OneBitAdam

_OPTIONS = ("coefficient_range", "coefficient_beta", "factor_range", "factor_threshold")


@keras.saving.register_keras_serializable(package="hvd_compress")
class OneBitLAMB(Layerwise, OneBitAdam):
    """LAMB whose variance and whose layers' coefficients are frozen after ``freeze_step`` steps, so
    that momentum can be sent in one bit an element::

        lamb = hvd.OneBitLAMB(2e-3, freeze_step=2000)
        optimizer = hvd.DistributedOptimizer(lamb, compression=lamb.compressor())

    Formula, state and deviations are those of :class:`hvd_compress.torch.OneBitLAMB`; the
    number of updates is counted for all variables together.

    Args:
        learning_rate, beta_1, beta_2, epsilon, freeze_step, bias_correction: as for
            :class:`OneBitAdam`.
        weight_decay: a part of the direction u, as in LAMB; ``exclude_from_weight_decay`` works as
            ever.
        coefficient_range, coefficient_beta: limits of the coefficients, and of their average.
        factor_range: limits of the factor r.
        factor_threshold: from one step to the next r changes by this share at most.
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
        coefficient_range: tuple[float, float] = (0.01, 10.0),
        coefficient_beta: float = 0.9,
        factor_range: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
        name: str = "onebit_lamb",
        **options: Any,
    ) -> None:
        check_coefficients(coefficient_range, coefficient_beta, factor_range, factor_threshold)
        adams = (learning_rate, beta_1, beta_2, epsilon, freeze_step, bias_correction, weight_decay)
        super().__init__(*adams, name, **options)
        self.coefficient_range, self.coefficient_beta = list(coefficient_range), coefficient_beta
        self.factor_range, self.factor_threshold = list(factor_range), factor_threshold

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {name: getattr(self, name) for name in _OPTIONS}

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._fresh_velocities = self.add_optimizer_variables(variables, "fresh_velocity")
        # Both are positive as soon as they are known.
        self._coefficients, self._factors = (
            [
                self.add_variable((), "zeros", variable.dtype, name=f"{name}_{i}")
                for i, variable in enumerate(variables)
            ]
            for name in ("coefficient", "factor")
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        place, w = self._get_variable_index(variable), native(variable).value()
        frozen, before = self._is_frozen(), native(self._momentums[place]).value()
        adams = self._direction(gradient, variable, frozen)
        u = adams + self._decay(variable) * w
        norm = norm_of(u)

        def lambs_coefficient() -> Any:
            a, norm_w = self._coefficients[place], norm_of(w)
            ratio = ops.cast(quotient(norm_w, norm, norm_w, norm), w.dtype)
            c = tf.clip_by_value(ratio, *self.coefficient_range)
            start = ops.where(a > 0, a, c)
            a.assign(start + (1 - self.coefficient_beta) * (c - start))
            return c

        def frozen_coefficient() -> Any:
            share = ops.minimum(quotient(norm_of(adams), norm, norm, norm), 1.0)
            return self._frozen_coefficient(before, place, ops.cast(share, w.dtype))

        c = tf.cond(ops.convert_to_tensor(frozen), frozen_coefficient, lambs_coefficient)
        variable.assign(w - u * (ops.cast(learning_rate, w.dtype) * c))

    def _frozen_coefficient(self, before: Any, place: int, share: Any) -> Any:
        """Return a r, and update what r is computed from; ``share`` of the step is not decay."""
        a, factor = self._coefficients[place], self._factors[place]
        v, fresh = self._velocities[place], self._fresh_velocities[place]
        begun = factor > 0
        g = (self._momentums[place] - self.beta_1 * before) / (1 - self.beta_1)
        fresh.assign(self.beta_2 * ops.where(begun, fresh, v) + (1 - self.beta_2) * ops.square(g))
        # Where v is 0 nothing is known, and no step is taken.
        quotients = ops.where(v > 0, self._scale(v) / self._scale(fresh), 0.0)
        largest = ops.max(quotients) if 0 not in v.shape else 1.0
        new = tf.clip_by_value(largest * share + (1 - share), *self.factor_range)
        last, change = ops.where(begun, factor, 1.0), self.factor_threshold
        new = tf.clip_by_value(new, last * (1 - change), last * (1 + change))
        factor.assign(new)
        return ops.where(a > 0, a, 1.0) * new


# The class of a distributed optimizer is made from this one, and is saved under its bare name.
keras.saving.get_custom_objects()["OneBitLAMB"] = OneBitLAMB
