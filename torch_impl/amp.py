"""Loss scaling: what waits in a residual is kept in true units, whatever the scale is.

The scale of a ``GradScaler`` changes between steps, and residuals must not change with it.  So
methods that keep a state get the gradient divided by the scale, and the average is multiplied by
it, for ``scaler.unscale_`` to divide it again.

PyTorch tells neither gradients nor optimizers of the scale.  Three public methods of ``GradScaler``
are therefore wrapped when this package is imported: ``scale`` hangs a hook on the scaled loss, so
that a gradient hook can tell whether the backward pass that calls it is scaled, and by how much;
``unscale_`` brings in what is still under way, so that ``scaler.step(optimizer)`` works without an
explicit ``optimizer.synchronize()``; and after ``step``, taken or skipped, the step is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: scale of the backward pass that is running, if that is scaled
_running: float | None = None


def running_scale() -> float | None:
    """Inside a gradient hook: the scale of its backward pass, ``None`` without one."""
    return _running


#: a ``GradScaler`` lets an optimizer step, and has averaged before
_steps = False


def scaler_steps() -> bool:
    """Inside ``optimizer.step()``: whether a ``GradScaler`` calls it."""
    return _steps


def watch_grad_scaler() -> None:
    """Wrap the three methods, once."""
    cls = torch.amp.GradScaler
    if hasattr(cls.scale, "_hvd_compress"):
        return
    scale, unscale_, step = cls.scale, cls.unscale_, cls.step

    @functools.wraps(scale)
    def watched_scale(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if not self.is_enabled():
            return scaled
        return _for_each(scaled, functools.partial(_hang_hook, factor=self.get_scale()))

    @functools.wraps(unscale_)
    def watched_unscale_(self: Any, optimizer: Any) -> None:
        binding = _binding_of(optimizer)
        if binding is not None and self.is_enabled():
            binding.expect_scale(self.get_scale())
            optimizer.synchronize()
            binding.confirm_scale(self.get_scale())
        unscale_(self, optimizer)

    @functools.wraps(step)
    def watched_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        global _steps
        _steps = True
        try:
            result = step(self, optimizer, *args, **kwargs)
        finally:
            _steps = False
        if _binding_of(optimizer) is not None:
            optimizer._synchronized = False
        return result

    watched_scale._hvd_compress = True  # type: ignore[attr-defined]
    cls.scale, cls.unscale_, cls.step = watched_scale, watched_unscale_, watched_step


def _binding_of(optimizer: Any) -> Any:
    from .binding import Binding

    binding = getattr(optimizer, "compression", None)
    return binding if isinstance(binding, Binding) else None


def _for_each(outputs: Any, action: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``outputs`` is what ``GradScaler.scale`` takes: a tensor or an iterable of such."""
    if isinstance(outputs, torch.Tensor):
        return action(outputs)
    mapped = map(functools.partial(_for_each, action=action), outputs)
    return type(outputs)(mapped) if isinstance(outputs, list | tuple) else mapped


def _hang_hook(loss: torch.Tensor, factor: float) -> torch.Tensor:
    if loss.requires_grad:
        loss.register_hook(functools.partial(_enter, factor))
    return loss


def _enter(factor: float, _: torch.Tensor) -> None:
    global _running
    _running = factor
    torch.autograd.Variable._execution_engine.queue_callback(_leave)


def _leave() -> None:
    global _running
    _running = None
