"""Which parameters a backward pass has used, under DistributedDataParallel.

Where no rank has used a parameter, DDP drops what its hook returns.  What the exchange took out of
the residual would be lost, so the state of such a parameter stays as it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def may_leave_out(model: torch.nn.Module | None) -> bool:
    """Return whether a backward pass of a model may leave parameters out: DDP says so of itself,
    and of what is not in DDP yet nothing is known."""
    if not isinstance(model, DistributedDataParallel):
        return True
    return bool(model.find_unused_parameters or model.static_graph)


class UsedParameters:
    """Notes the parameters whose gradients autograd has written since :meth:`forget`."""

    def __init__(self) -> None:
        self._noted: list[torch.Tensor] = []
        self._hooks: dict[int, Any] = {}  # by id: to hash a parameter takes long
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note parameters from now on."""
        for p in parameters:
            if p.requires_grad and id(p) not in self._hooks:
                self._hooks[id(p)] = p.register_post_accumulate_grad_hook(self._noted.append)

    def unused(self, gradients: Mapping[str, torch.Tensor], of: Iterable[torch.Tensor]) -> set[str]:
        """Return the names of gradients that are zeros, since this rank did not use the parameters
        ``of`` which they are."""
        used = {id(p) for p in self._noted}
        return {
            name
            for (name, gradient), p in zip(gradients.items(), of, strict=True)
            if id(p) in self._hooks and id(p) not in used and not gradient.any()
        }

    def forget(self) -> None:
        """Begin anew, since the gradients have been exchanged."""
        self._noted.clear()


def _remove(hooks: dict[int, Any]) -> None:
    for hook in hooks.values():
        hook.remove()
