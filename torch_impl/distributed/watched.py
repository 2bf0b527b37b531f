"""Parameters whose gradients are watched by an optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch


@dataclasses.dataclass(eq=False)
class Watched:
    """A parameter with a hook: its backward passes since the last exchange, whether these were all,
    and with which gradient its exchange has begun, of which version, at which address."""

    parameter: torch.nn.Parameter
    passes: int = 0
    is_started: bool = False
    gradient: torch.Tensor | None = None
    version: int = 0
    address: int = 0


def note_begun(everyone: Iterable[Watched]) -> None:
    """Note that gradients are exchanged as they are now."""
    for each in everyone:
        each.is_started = True
        gradient = each.gradient = each.parameter.grad
        if gradient is not None:
            each.version = gradient._version
            each.address = 0 if gradient.is_sparse else gradient.data_ptr()


def changed_since(everyone: Iterable[Watched]) -> list[torch.nn.Parameter]:
    """Return those to whose gradients somebody has written since their exchange began, or put
    others there.  A gradient that was given other memory is not known to have other numbers, and
    views share their version with all of the buffer that they are in."""
    return [
        each.parameter
        for each in everyone
        if (gradient := each.gradient) is not None
        and (
            gradient is not each.parameter.grad
            or (
                gradient._version != each.version
                and (gradient.is_sparse or gradient.data_ptr() == each.address)
                and not gradient._is_view()
            )
        )
    ]
