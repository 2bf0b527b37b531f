"""Optimizers that no ``LossScaleOptimizer`` may wrap, since it would let ranks step apart."""

from __future__ import annotations

from typing import Any, ClassVar

from hvd_compress.errors import UnsupportedError

_MARKS = {"loss_scale_factor": None, "_is_wrapped_by_loss_scale_optimizer": True}


class NotInLossScaling:
    """Mixed into the class of an optimizer: once it is set up, wrapping it is an error.

    A ``LossScaleOptimizer`` looks for NaN and Inf before gradients are averaged: some ranks would
    step, and others wait for them.  It marks what it wraps: that of Keras 3 switches off the loss
    scaling of the optimizer itself, and that of tf_keras says that it wraps it.
    """

    #: what to write instead
    instead_of_scaling: ClassVar[str]
    may_be_wrapped = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.may_be_wrapped and name in _MARKS and value is _MARKS[name]:
            raise UnsupportedError(self.instead_of_scaling)
        super().__setattr__(name, value)
