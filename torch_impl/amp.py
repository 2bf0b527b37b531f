"""The loss scale of the current step.

Residuals are kept without the loss scale: the scale of a ``GradScaler`` changes between steps, and
residuals must not change with it.  So methods that keep a state get the gradient divided by the
scale, and the average is multiplied by it, for ``scaler.unscale_`` to divide it again.  PyTorch
tells neither gradients nor optimizers of the scale; ``grad_scaler.py`` notes it here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

#: scale of the backward pass that is running, if that is scaled
_running: float | None = None

#: a ``GradScaler`` lets an optimizer step, and has averaged before
_steps = False


def running_scale() -> float | None:
    """Return the loss scale of the backward pass whose hooks run now, or ``None`` without one."""
    return _running


def forget_scale() -> None:
    """Note that no backward pass runs: one that ended with an error did not say so."""
    _leave()


def scaler_steps() -> bool:
    """Return whether a ``GradScaler`` calls the ``optimizer.step()`` that runs now."""
    return _steps


@contextlib.contextmanager
def scaler_step() -> Iterator[None]:
    """Mark, for as long as the context lasts, that a ``GradScaler`` calls ``optimizer.step()``."""
    global _steps
    _steps = True
    try:
        yield
    finally:
        _steps = False


def note_scale(outputs: Any, factor: float) -> Any:
    """Return scaled losses whose backward pass has the scale ``factor``.

    Args:
        outputs: what ``GradScaler.scale`` returns: a tensor, or a nest of iterables of such.
    """
    return _for_each(outputs, functools.partial(_hang_hook, factor=factor))


def _for_each(outputs: Any, action: Callable[[torch.Tensor], torch.Tensor]) -> Any:
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
