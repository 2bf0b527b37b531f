"""LARS, LAMB, 1-bit Adam, 1-bit LAMB and 0/1 Adam for Keras 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvd_compress import optimizers
from hvd_compress.errors import ConfigError
from hvd_compress.optimizers import Now

from ..binding import VariableBinding
from ..saved_state import state_on_disk
from ..slots import native
from .optimizer_host import KerasFormulaOptimizer, KerasPartnerOptimizer


class LARS(KerasFormulaOptimizer):
    """SGD with momentum at large batches, with a learning rate for each layer::

        optimizer = hvd.DistributedOptimizer(hvd.LARS(3.2, weight_decay=1e-4), compression=hvd.FP16)

    >>> w = keras.Variable([3.0, 4.0])
    >>> lars = hvd.LARS(0.1, weight_decay=1e-4)
    >>> optimizer = hvd.DistributedOptimizer(lars, compression=hvd.FP16)
    >>> optimizer.apply([tf.constant([0.6, 0.8])], [w])
    >>> w.numpy().round(3)
    array([2.94, 3.92], dtype=float32)
    """

    formula = optimizers.LARS


class LAMB(KerasFormulaOptimizer):
    """Adam at large batches, with a learning rate for each layer::

        optimizer = hvd.DistributedOptimizer(hvd.LAMB(2e-3), compression=hvd.FP16)

    ``keras.optimizers.Lamb`` takes the same steps without weight decay.  It decays weights after
    the step; the paper has decay inside of the direction whose norm is taken.

    >>> w = keras.Variable([3.0, 4.0])
    >>> lamb = hvd.LAMB(2e-3, weight_decay=0.01)
    >>> optimizer = hvd.DistributedOptimizer(lamb, compression=hvd.FP16)
    >>> optimizer.apply([tf.constant([0.6, 0.8])], [w])
    >>> w.numpy().round(3)
    array([2.993, 3.993], dtype=float32)
    """

    formula = optimizers.LAMB


class OneBitAdam(KerasPartnerOptimizer):
    """AdamW that sends its momentum in one bit per element once its variance has settled::

        adam = hvd.OneBitAdam(1e-3, freeze_step=20_000)
        optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())

    >>> w = keras.Variable([3.0, 4.0])
    >>> adam = hvd.OneBitAdam(0.1, freeze_step=1)
    >>> optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())
    >>> for _ in range(2):
    ...     optimizer.apply([tf.constant([0.6, 0.8])], [w])
    >>> w.numpy().round(3)
    array([2.8, 3.8], dtype=float32)
    """

    formula = optimizers.OneBitAdam

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self._rows: frozenset[int] = frozenset()

    def _now_of(self, grads: Sequence[Any], variables: Sequence[Any]) -> Now:
        # Sparse gradients were sent uncompressed.
        pairs = zip(grads, variables, strict=True)
        self._rows = frozenset(id(native(v)) for g, v in pairs if isinstance(g, tf.IndexedSlices))
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        step = self.iterations if self._binding is None else self._binding.step.value() - 1
        frozen = tf.convert_to_tensor(step >= self.freeze_step)
        now = super()._now_of(grads, variables)
        count = tf.where(frozen, self._variance_steps.value, tf.cast(now.step, tf.int64))
        self._variance_steps.assign(count)
        variance_step = tf.maximum(tf.cast(count, tf.float64), 1.0)
        return dataclasses.replace(now, variance_step=variance_step, frozen=frozen)

    def _now_for(self, variable: Any) -> Now:
        now = super()._now_for(variable)
        is_whole = self._is_shared(variable) and id(native(variable)) not in self._rows
        return dataclasses.replace(now, is_momentum=now.frozen if is_whole else False)


class OneBitLAMB(OneBitAdam):
    """LAMB that sends its momentum in one bit per element once its variance has settled::

        lamb = hvd.OneBitLAMB(1e-3, freeze_step=20_000)
        optimizer = hvd.DistributedOptimizer(lamb, compression=lamb.compressor())

    >>> w = keras.Variable([3.0, 4.0])
    >>> lamb = hvd.OneBitLAMB(0.1, freeze_step=1)
    >>> optimizer = hvd.DistributedOptimizer(lamb, compression=lamb.compressor())
    >>> for _ in range(2):
    ...     optimizer.apply([tf.constant([0.6, 0.8])], [w])
    >>> w.numpy().round(3)
    array([2.328, 3.328], dtype=float32)
    """

    formula = optimizers.OneBitLAMB


class ZeroOneAdam(KerasPartnerOptimizer):
    """Adam that sends one bit per element, and later nothing at all in most steps::

        adam = hvd.ZeroOneAdam(1e-3, var_freeze_step=20_000)
        optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())

    ``hvd.callbacks.CompressionCallback`` calls ``synchronize_parameters`` at the end of every
    epoch, and before a validation.

    >>> w = keras.Variable([3.0, 4.0])
    >>> adam = hvd.ZeroOneAdam(0.1, var_freeze_step=1)
    >>> optimizer = hvd.DistributedOptimizer(adam, compression=adam.compressor())
    >>> for _ in range(2):
    ...     optimizer.apply([tf.constant([0.6, 0.8])], [w])
    >>> optimizer.synchronize_parameters()  # before evaluation or a checkpoint, and at the end
    >>> w.numpy().round(3)
    array([2.8, 3.8], dtype=float32)
    """

    formula = optimizers.ZeroOneAdam
    refused = ()  # its compression returns gradients

    def __init__(self, *options: Any, **named: Any) -> None:
        super().__init__(*options, **named)
        self._sync: VariableBinding | None = None
        self._synchronizes: Any = None

    def follow(self, binding: VariableBinding, places: Mapping[int, int]) -> None:
        if self.use_ema:
            raise ConfigError("use_ema would average weights that differ between ranks: drop it")
        super().follow(binding, places)
        method = binding.method.for_parameters
        self._sync = binding.for_synchronization(method)
        self._sync.consolidate_call = "optimizer.synchronize_parameters()"
        self._sync.serves_all = self._is_synchronized
        self.synchronization_on_disk = state_on_disk(self._sync)

    def synchronize_parameters(self) -> None:
        """Give all ranks the same parameters now, in full precision, residuals included.

        This is a collective: call it on every rank, between steps.  A checkpoint afterwards is the
        same on all ranks, but for residuals of gradients; see ``compression.consolidate()``.
        """
        if self._sync is None:
            return
        self._sync.consolidate()
        buffers = {str(i): buffer.value() for i, buffer in enumerate(self._buffers())}
        means = []
        for i, mean in self._sync.average(buffers, "buffer").items():
            # What owners of shards keep is in units of a sum, and its mean is its share of ours.
            rest = list(self._sync.store.states[i].values())
            waiting = [tf.cast(tf.reshape(x, mean.shape), mean.dtype) for x in rest]
            means.append(tf.add_n([mean, *waiting]))
            for x in rest:
                x.assign(tf.zeros_like(x))
        self._arrive(means)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Take one step, and synchronize the parameters where that is due."""
        super().apply(grads, trainable_variables)
        if self._sync is not None:
            tf.cond(self._synchronizes, self._synchronize_in_one_bit, lambda: tf.constant(False))
        self._synchronizes = None

    def _now_of(self, grads: Sequence[Any], variables: Sequence[Any]) -> Now:
        # Steps may have been skipped after their exchange: the compression's count is what counts.
        step = self.iterations + 1 if self._binding is None else self._binding.step.value()
        schedule = self.compressor()
        index = schedule.phase_index(tf.cast(step, tf.int64))
        learns, local, sync = (schedule.phases.index(p) for p in ("variance", "local", "sync"))
        self._synchronizes = index == sync
        self._variance_steps.assign_add(tf.cast(index == learns, tf.int64))
        return dataclasses.replace(
            super()._now_of(grads, variables),
            variance_step=self._known_steps(),
            frozen=index != learns,
            is_local=(index == local) | (index == sync),
        )

    def _known_steps(self) -> tf.Tensor:
        return tf.maximum(tf.cast(self._variance_steps.value, tf.float64), 1.0)

    def _now_for(self, variable: Any) -> Now:
        now = super()._now_for(variable)
        return now if self._is_shared(variable) else dataclasses.replace(now, is_local=False)

    def _synchronized(self) -> list[Any]:
        """Return the variables that are synchronized, in the order of the binding's slots."""
        own = {id(native(variable)): variable for variable in self._trainable_variables}
        return [own[key] for key in sorted(self._places, key=self._places.__getitem__)]

    def _buffers(self) -> list[tf.Variable]:
        all_ = self.slots["buffer"]
        return [native(all_[self._get_variable_index(v)]) for v in self._synchronized()]

    def _synchronize_in_one_bit(self) -> tf.Tensor:
        assert self._sync is not None
        self._arrive(self._sync.reduce([buffer.value() for buffer in self._buffers()]))
        return tf.constant(True)

    def _arrive(self, means: Sequence[Any]) -> None:
        formula = self._formula(0.0, 0.0)
        now = Now(tf.cast(self.iterations, tf.float64), self._known_steps())
        for variable, mean in zip(self._synchronized(), means, strict=True):
            w, state = self._entries(variable)
            w, state = formula.synchronized(w, mean, state, now)
            self._keep(variable, w, state)
            if variable.constraint is not None:
                variable.assign(variable.constraint(w))

    def _is_synchronized(self) -> bool:
        """Return whether the parameters of this rank are those of all ranks."""
        assert self._sync is not None
        return self._sync.is_consolidated and not any(float(rate) for rate in self.slots["rate"])
