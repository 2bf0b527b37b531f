"""LARS, LAMB, 1-bit Adam and 1-bit LAMB for Keras 3."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_compress import optimizers
from hvd_compress.optimizers import Now

from ..slots import native
from .optimizer_host import FormulaOptimizer, PartnerOptimizer


class LARS(FormulaOptimizer):
    """LARS.

    >>> w = keras.Variable([3.0, 4.0])
    >>> lars = hvd.LARS(0.1, weight_decay=1e-4)
    >>> optimizer = hvd.DistributedOptimizer(lars, compression=hvd.FP16)
    >>> optimizer.apply([tf.constant([0.6, 0.8])], [w])
    >>> w.numpy().round(3)
    array([2.94, 3.92], dtype=float32)
    """

    formula = optimizers.LARS


class LAMB(FormulaOptimizer):
    """LAMB.  ``keras.optimizers.Lamb`` takes the same steps without weight decay; it decays weights
    beside the step, where the paper has decay inside of the direction whose norm is taken.

    >>> w = keras.Variable([3.0, 4.0])
    >>> lamb = hvd.LAMB(2e-3, weight_decay=0.01)
    >>> optimizer = hvd.DistributedOptimizer(lamb, compression=hvd.FP16)
    >>> optimizer.apply([tf.constant([0.6, 0.8])], [w])
    >>> w.numpy().round(3)
    array([2.993, 3.993], dtype=float32)
    """

    formula = optimizers.LAMB


class OneBitAdam(PartnerOptimizer):
    """1-bit Adam.

    >>> w = keras.Variable([3.0, 4.0])
    >>> adam = hvd.OneBitAdam(0.1, freeze_step=1)  # in earnest some thousand steps
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
    """1-bit LAMB.

    >>> w = keras.Variable([3.0, 4.0])
    >>> lamb = hvd.OneBitLAMB(0.1, freeze_step=1)
    >>> optimizer = hvd.DistributedOptimizer(lamb, compression=lamb.compressor())
    >>> for _ in range(2):
    ...     optimizer.apply([tf.constant([0.6, 0.8])], [w])
    >>> w.numpy().round(3)
    array([2.328, 3.328], dtype=float32)
    """

    formula = optimizers.OneBitLAMB
