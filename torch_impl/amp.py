"""Loss scaling: exchanges work in true units, whatever the scale of a ``GradScaler`` is.

The scale changes between steps, and what waits in a residual must not change with it.  So
gradients are divided by the scale on their way in and averages multiplied on their way out, where
``scaler.unscale_`` divides them again.

PyTorch does not tell an optimizer of its scaler before the gradients exist.  Two public methods of
``GradScaler`` are therefore wrapped when this package is imported: ``scale`` leaves a note of the
scaler that was used last, ``unscale_`` confirms that it is this optimizer's.  ``unscale_`` also
brings in what is still under way, so that ``scaler.step(optimizer)`` works without an explicit
``optimizer.synchronize()``.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hvd_compress.torch.binding import Binding

_last_used: weakref.ref[Any] | None = None


def watch_grad_scaler() -> None:
    """Wrap ``GradScaler.scale`` and ``GradScaler.unscale_``, once."""
    cls = torch.amp.GradScaler
    scale, unscale_ = cls.scale, cls.unscale_
    if hasattr(scale, "_hvd_compress"):
        return

    @functools.wraps(scale)
    def watched_scale(self: Any, outputs: Any) -> Any:
        global _last_used
        if self.is_enabled():
            _last_used = weakref.ref(self)
        return scale(self, outputs)

    @functools.wraps(unscale_)
    def watched_unscale_(self: Any, optimizer: Any) -> None:
        loss_scale = getattr(getattr(optimizer, "compression", None), "loss_scale", None)
        if isinstance(loss_scale, LossScale) and self.is_enabled():
            optimizer.synchronize()
            loss_scale.confirm(self)
        unscale_(self, optimizer)

    watched_scale._hvd_compress = True  # type: ignore[attr-defined]
    cls.scale, cls.unscale_ = watched_scale, watched_unscale_


class LossScale:
    """The scale of one optimizer's gradients: ``value`` is constant during a step."""

    def __init__(self, binding: Binding) -> None:
        self._binding = weakref.ref(binding)
        self._scaler: weakref.ref[Any] | None = None
        self._confirmed = False
        self._others: weakref.WeakSet[Any] = weakref.WeakSet()
        self._used = 1.0
        self._value: float | None = None

    @property
    def value(self) -> float:
        if self._value is None:
            scaler = self._scaler and self._scaler()
            if scaler is None and (last := _last_used and _last_used()) not in self._others:
                scaler, self._scaler, self._confirmed = last, _last_used, False
            self._value = self._used = float(scaler.get_scale()) if scaler is not None else 1.0
        return self._value

    def forget(self) -> None:
        """The step is over; the scale may change now."""
        self._value = None

    def confirm(self, scaler: Any) -> None:
        """This optimizer's gradients carry the scale of ``scaler``."""
        if self._scaler is None or self._scaler() is not scaler:
            self._correct(float(scaler.get_scale()))
            self._scaler = weakref.ref(scaler)
        self._confirmed = True

    def before_step(self) -> None:
        """A step without ``unscale_``: the scaler that was used last is somebody else's."""
        if not self._confirmed and self._scaler is not None:
            if (scaler := self._scaler()) is not None:
                self._others.add(scaler)
            self._scaler = None
            self._correct(1.0)

    def _correct(self, scale: float) -> None:
        """What was accumulated under a wrong guess of the scale gets its true size."""
        binding = self._binding()
        if binding is not None and self._used != scale:
            binding.rescale_states(self._used / scale)
        self._used = scale
