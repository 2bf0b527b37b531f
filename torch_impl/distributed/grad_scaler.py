"""Loss scaling: wrapped methods of ``torch.amp.GradScaler`` for distributed optimizers.

They are wrapped when this package is imported: ``scale`` notes the scale of the backward pass that
will follow (:mod:`.amp`); ``unscale_`` finishes the exchanges in flight, so that
``scaler.step(optimizer)`` works without an explicit ``optimizer.synchronize()``; and after
``step``, taken or skipped, the step is over.  For an optimizer with local steps a step that is
skipped counts as well, so that the rank meets the others in time.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..amp import scaler_step, watch_scale
from ..systems.optimizer import LocalStepsOptimizer
from .compressed_optimizer import CompressedOptimizer


def watch_grad_scaler() -> None:
    """Wrap the methods, once."""
    watch_scale()
    cls: Any = torch.amp.GradScaler
    if hasattr(cls.step, "_hvd_compress"):
        return
    unscale_, step = cls.unscale_, cls.step

    @functools.wraps(unscale_)
    def watched_unscale_(self: Any, optimizer: Any) -> None:
        if isinstance(optimizer, CompressedOptimizer) and self.is_enabled():
            optimizer.compression.expect_scale(self.get_scale())
            optimizer.synchronize()
            optimizer.compression.confirm_scale(self.get_scale())
        unscale_(self, optimizer)

    @functools.wraps(step)
    def watched_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        steps = optimizer.training.step if isinstance(optimizer, LocalStepsOptimizer) else None
        with scaler_step():
            result = step(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, LocalStepsOptimizer) and optimizer.training.step == steps:
            optimizer.skip_step()
        if isinstance(optimizer, CompressedOptimizer):
            optimizer.end_step()
        return result

    watched_step._hvd_compress = True  # type: ignore[attr-defined]
    cls.unscale_, cls.step = watched_unscale_, watched_step
