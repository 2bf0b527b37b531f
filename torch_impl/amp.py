"""The loss scale of the current step.

Residuals are kept without the loss scale: the scale of a ``GradScaler`` changes between steps, and
residuals must not change with it.  So methods that keep a state get the gradient divided by the
scale.  The average is multiplied by it, for ``scaler.unscale_`` to divide it again.  PyTorch
tells neither gradients nor optimizers of the scale, so ``GradScaler.scale`` is wrapped.

A scale belongs to one backward pass, and a step to one thread: others may train meanwhile.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import torch

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError


class _Pass(NamedTuple):
    """A backward pass: its scale, the thread that runs the hooks of its loss, and the owner, the
    thread that has scaled the loss.  On a GPU the former is PyTorch's own."""

    scale: float
    thread: int
    owner: int


#: those that run, by PyTorch's number of the pass
scaled_passes: dict[int, _Pass] = {}


class _Thread(threading.local):
    """Facts about this thread alone: whether a ``GradScaler``, which has averaged before, calls the
    ``optimizer.step()`` that runs now, be it a wrapped optimizer's."""

    scaler_steps = False


this_thread = _Thread()


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
            scaled_passes.pop(number, None)


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
    """Raise ``ConfigError`` if the loss scale is in the gradients that are exchanged, and the
    method keeps some of them for later steps.  The scale may be another one then."""
    if is_scaled and method.per_rank(torch.zeros(64, 64)):
        for number, each in list(scaled_passes.items()):
            if each.thread == threading.get_ident():  # its pass ends here
                scaled_passes.pop(number, None)
        raise ConfigError(
            f"{method.name} keeps residuals, and with a loss scale that changes between steps they "
            f"would not fit the gradients that they are added to: {instead}"
        )


#: what a hook says instead, which cannot take the scale out of gradients
NO_SCALE = "train in bfloat16, or use hvd.DistributedOptimizer, which takes the scale out"


def note_scale(outputs: Any, factor: float) -> Any:
    """Return scaled losses whose backward pass has the scale ``factor``.

    Args:
        outputs: what ``GradScaler.scale`` returns: a tensor, or a nest of iterables of such.
    """
    if not isinstance(outputs, torch.Tensor):
        noted = map(functools.partial(note_scale, factor=factor), outputs)
        return type(outputs)(noted) if isinstance(outputs, list | tuple) else noted
    owner = threading.get_ident()

    def enter(_: torch.Tensor) -> None:
        number = current_pass()
        scaled_passes[number] = _Pass(factor, threading.get_ident(), owner)
        leave: Any = functools.partial(scaled_passes.pop, number, None)
        torch.autograd.Variable._execution_engine.queue_callback(leave)

    if outputs.requires_grad:
        outputs.register_hook(enter)
    return outputs


def current_pass() -> int:
    """Return PyTorch's number of the backward pass whose hooks run now; -1 outside of one."""
    return torch._C._current_graph_task_id()
