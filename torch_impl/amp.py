"""The loss scale of the current step.

Residuals are kept without the loss scale: the scale of a ``GradScaler`` changes between steps, and
residuals must not change with it.  So methods that keep a state get the gradient divided by the
scale, and the average is multiplied by it, for ``scaler.unscale_`` to divide it again.  PyTorch
tells neither gradients nor optimizers of the scale, so ``GradScaler.scale`` is wrapped.

A scale belongs to one backward pass, and a step to one thread: others may train meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError


class _Pass(NamedTuple):
    """A backward pass: its scale, the thread that runs the hooks of its loss, which is PyTorch's
    own for a GPU, and the owner, the thread that has scaled the loss."""

    scale: float
    thread: int
    owner: int


#: those that run, by PyTorch's number of the pass
scaled_passes: dict[int, _Pass] = {}


class _Steps(threading.local):
    is_scalers = False


#: a ``GradScaler`` lets an optimizer step in this thread, and has averaged before
_steps = _Steps()


def running_scale() -> float | None:
    """Return the loss scale of the backward pass whose hooks run now, or ``None`` without one."""
    number = current_pass() if scaled_passes else -1
    if number < 0:
        return None
    if (found := scaled_passes.get(number)) is None:
        # A pass inside of another, as checkpoints with use_reentrant=True begin one.
        here = threading.get_ident()
        found = next(
            (each for each in reversed(scaled_passes.values()) if each.thread == here), None
        )
    return None if found is None else found.scale


def forget_scale() -> None:
    """Note that no backward pass runs in this thread: one that ended with an error did not say
    so."""
    here = threading.get_ident()
    for number, each in list(scaled_passes.items()):
        if each.owner == here:
            _leave(number)


def scaler_steps() -> bool:
    """Return whether a ``GradScaler`` calls the ``optimizer.step()`` that runs now."""
    return _steps.is_scalers


@contextlib.contextmanager
def scaler_step() -> Iterator[None]:
    """Mark, for as long as the context lasts, that a ``GradScaler`` calls ``optimizer.step()``."""
    _steps.is_scalers = True
    try:
        yield
    finally:
        _steps.is_scalers = False


def watch_scale() -> None:
    """Wrap ``GradScaler.scale``, once, so that it notes the scale of the backward pass."""
    cls: Any = torch.amp.GradScaler
    if hasattr(cls.scale, "_hvd_compress"):
        return
    scale = cls.scale

    @functools.wraps(scale)
    def watched_scale(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return note_scale(scaled, self.get_scale()) if self.is_enabled() else scaled

    watched_scale._hvd_compress = True  # type: ignore[attr-defined]
    cls.scale = watched_scale


def refuse_scale(method: Compressor, is_scaled: bool, instead: str) -> None:
    """Raise ``ConfigError`` where the loss scale is in the gradients that are exchanged, and the
    method keeps some of them for later steps, in which the scale may be another one."""
    if is_scaled and method.per_rank(torch.zeros(64, 64)):
        for number, each in list(scaled_passes.items()):
            if each.thread == threading.get_ident():  # its pass ends here
                _leave(number)
        raise ConfigError(
            f"{method.name} keeps residuals, and with a loss scale that changes between steps they "
            f"would be of another scale than the gradients that they are added to: {instead}"
        )


#: what a hook says instead, which cannot take the scale out of gradients
NO_SCALE = "train in bfloat16, or use hvd.DistributedOptimizer, which takes the scale out"


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
        loss.register_hook(functools.partial(_enter, factor, threading.get_ident()))
    return loss


def _enter(factor: float, owner: int, _: torch.Tensor) -> None:
    number = current_pass()
    scaled_passes[number] = _Pass(factor, threading.get_ident(), owner)
    torch.autograd.Variable._execution_engine.queue_callback(functools.partial(_leave, number))


def _leave(number: int) -> None:
    scaled_passes.pop(number, None)


def current_pass() -> int:
    """Return PyTorch's number of the backward pass whose hooks run now; -1 outside of one."""
    return torch._C._current_graph_task_id()
