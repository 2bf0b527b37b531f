"""0/1 Adam for Keras 3 (Lu et al., ICLR 2023); its messages are ``methods/zero_one_adam.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from hvd_compress.errors import ConfigError
from hvd_compress.methods.zero_one_adam import ZeroOneAdamCompression

from ..binding import Binding, native
from ..state_on_disk import state_on_disk
from .frozen_adam import FrozenAdam


class _Phase(NamedTuple):
    """Of a step: symbols."""

    learns: tf.Tensor
    is_local: tf.Tensor
    synchronizes: tf.Tensor


@keras.saving.register_keras_serializable(package="hvd_compress")
class ZeroOneAdam(FrozenAdam):
    """Adam that learns its variance at ever fewer steps, and later synchronizes the parameters at
    ever fewer steps::

        adam = hvd.ZeroOneAdam(1e-3, var_freeze_step=5000)
        optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())
        ...
        optimizer.synchronize_parameters()  # before evaluation or a checkpoint, and at the end

    ``hvd.callbacks.CompressionCallback`` does the last at the end of every epoch, and before a
    validation.

    Formulas and deviations are those of :class:`hvd_compress.torch.ZeroOneAdam`.  Differs from it
    in: the number of updates is counted for all variables together; the arrays of the local steps
    are there from the beginning.

    Args:
        learning_rate, beta_1, beta_2, epsilon, bias_correction, weight_decay, options: as for
            ``OneBitAdam``.
        var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper: see
            :class:`~hvd_compress.methods.zero_one_adam.ZeroOneAdamCompression`.

    Without this package's compression gradients are averaged otherwise, and there are no local
    steps.

    Raises:
        ConfigError: an option makes no sense.
    """

    method = ZeroOneAdamCompression
    schedule = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    refused = ()  # its compression returns gradients

    def __init__(
        self,
        learning_rate: Any = 1e-3,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        bias_correction: bool = True,
        weight_decay: float | None = None,
        name: str = "zero_one_adam",
        **options: Any,
    ) -> None:
        super().__init__(
            *(learning_rate, beta_1, beta_2, epsilon, bias_correction, weight_decay, name, options),
            var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler,
            local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper,
        )
        self._sync: Binding | None = None
        self._phase: _Phase | None = None

    def follow(self, binding: Binding, places: Mapping[int, int]) -> None:
        if self.use_ema:
            raise ConfigError("use_ema would average weights that differ between ranks: drop it")
        super().follow(binding, places)
        method = binding.method.for_parameters  # type: ignore[attr-defined]
        self._sync = binding.for_synchronization(method)
        self.synchronization_on_disk = state_on_disk(
            self._sync, "optimizer.synchronize_parameters()", self._is_synchronized
        )

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        super().build(variables)
        self._anchors, self._buffers = self.add_optimizer_variables(variables, ["anchor", "buffer"])
        self._rates = [
            self.add_variable((), "zeros", "float64", name=f"rate_{i}")
            for i in range(len(variables))
        ]

    def synchronize_parameters(self) -> None:
        """Give all ranks the same parameters now, in full precision, residuals included.

        This is a collective: call it on every rank, between steps.  What is saved afterwards is the
        same on all ranks, but for residuals of gradients; see ``compression.consolidate()``.
        """
        if self._sync is None:
            return
        self._sync.consolidate()
        variables = self._synchronized()
        buffers = [native(self._buffers[self._get_variable_index(v)]) for v in variables]
        prefix = f"hvd_compress.{self._sync.number}.buffer"
        self._sync.average([(f"{prefix}.{i}", buffer) for i, buffer in enumerate(buffers)])
        means = []
        for i, buffer in enumerate(buffers):
            # What owners of shards keep is in units of a sum, and its mean is its share of ours.
            rest = list(self._sync.states[str(i)].values())
            waiting = [tf.cast(tf.reshape(x, buffer.shape), buffer.dtype) for x in rest]
            means.append(tf.add_n([buffer.value(), *waiting]))
            for x in rest:
                x.assign(tf.zeros_like(x))
        self._arrive(variables, means)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        grads = list(grads)
        known = self._trainable_variables if trainable_variables is None else trainable_variables
        variables = list(known)
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
        self._phase = phase = self._phase_of_now()
        self._variance_steps.assign_add(tf.cast(phase.learns, tf.int64))
        super().apply(grads, variables)
        self._phase = None  # it belongs to the graph
        if self._sync is not None:
            tf.cond(phase.synchronizes, self._synchronize_in_one_bit, lambda: tf.constant(False))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        place, phase = self._get_variable_index(variable), self._phase
        assert phase is not None
        m, v = self._momentums[place], self._velocities[place]
        dtype = variable.dtype
        gradient = ops.cast(tf.convert_to_tensor(gradient), dtype)
        m.assign(self.beta_1 * m + (1 - self.beta_1) * gradient)
        new = self.beta_2 * v + (1 - self.beta_2) * ops.square(gradient)
        v.assign(ops.where(phase.learns, new, v))
        bias = self._momentum_bias(self.iterations + 1, dtype)
        update, scale = m * (ops.cast(learning_rate, dtype) / bias), self._scale(v)

        def common_step() -> tf.Tensor:
            variable.assign(variable - update / scale)
            return tf.constant(False)

        def local_step() -> tf.Tensor:
            anchor, buffer, rate = self._anchors[place], self._buffers[place], self._rates[place]
            lr, decay = tf.cast(learning_rate, tf.float64), tf.ones((), tf.float64)
            if self.weight_decay and self._use_weight_decay(variable):
                decay -= lr * self.weight_decay
            # After a synchronization the variable itself is the anchor, and has decayed.
            left = ops.cast(decay, dtype)
            anchor.assign(ops.where(rate > 0, left * anchor, variable))
            buffer.assign(left * buffer + update)
            rate.assign(decay * rate + lr)
            variable.assign(anchor - buffer / scale)
            return tf.constant(True)

        if id(native(variable)) in self._places:
            tf.cond(phase.is_local, local_step, common_step)
        else:
            common_step()

    def _phase_of_now(self) -> _Phase:
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        step = self.iterations + 1 if self._binding is None else self._binding.step.value()
        schedule = self.compressor()
        index = schedule.phase_index(tf.cast(step, tf.int64))
        learns, local, sync = (schedule.phases.index(p) for p in ("variance", "local", "sync"))
        return _Phase(index == learns, (index == local) | (index == sync), index == sync)

    def _synchronized(self) -> list[Any]:
        """Return the variables that are synchronized, in the order of the binding's slots."""
        own = {id(native(variable)): variable for variable in self._trainable_variables}
        return [own[key] for key in sorted(self._places, key=self._places.__getitem__)]

    def _synchronize_in_one_bit(self) -> tf.Tensor:
        assert self._sync is not None
        variables = self._synchronized()
        buffers = [native(self._buffers[self._get_variable_index(v)]) for v in variables]
        self._arrive(variables, self._sync.reduce([buffer.value() for buffer in buffers]))
        return tf.constant(True)

    def _arrive(self, variables: Sequence[Any], means: Sequence[Any]) -> None:
        for variable, mean in zip(variables, means, strict=True):
            place, dtype = self._get_variable_index(variable), variable.dtype
            m, rate = self._momentums[place], self._rates[place]
            moved = rate > 0  # else only residuals move the parameter
            start = ops.where(moved, self._anchors[place], variable)
            end = start - mean / self._scale(self._velocities[place])
            variable.assign(end if variable.constraint is None else variable.constraint(end))
            bias = self._momentum_bias(self.iterations, dtype)
            share = bias / ops.cast(ops.where(moved, rate, 1.0), dtype)
            m.assign(ops.where(moved, mean * share, m))
            self._buffers[place].assign(tf.zeros_like(mean))
            rate.assign(0.0)

    def _is_synchronized(self) -> bool:
        """Return whether the parameters of this rank are those of all ranks."""
        assert self._sync is not None
        return self._sync.is_consolidated and not any(float(rate) for rate in self._rates)


# The class of a distributed optimizer is made from this one, and is saved under its bare name.
keras.saving.get_custom_objects()["ZeroOneAdam"] = ZeroOneAdam
