"""Registration with Horovod, so that ``import horovod.torch as hvd`` works with this package.

Horovod gives a compressor neither the parameters nor the optimizer, and DGC needs both.  So the
public functions that take an optimizer are wrapped when this package is imported.  Calls without
this package's compressors are passed on unchanged, after ranks have compared HVD_COMPRESSION.  No
file of Horovod is changed, and nothing private of it is used under PyTorch; docs/design.md has the
list for TensorFlow.

``torch.amp.GradScaler`` is wrapped as well.  ``scale`` notes the scale of the backward pass that
will follow (:mod:`hvd_compress.torch.amp`).  ``unscale_`` finishes the exchanges in flight, so that
``scaler.step(optimizer)`` works without ``optimizer.synchronize()``.  After ``step``, taken or
skipped, the step is over.  An optimizer with local steps counts skipped steps as well, so that the
rank meets the others in time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hvd_compress.engines.base import Engine
from hvd_compress.integrations.horovod import checked_join, take_stateless

from ..amp import this_thread, watch_scale
from ..engine import HorovodEngine
from ..state import checkpoint
from .compressed_optimizer import CompressedOptimizer, bound_optimizers
from .distributed_optimizer import wrap_factory
from .local_steps import LocalStepsOptimizer, broadcast_training_state


def register(hvd: Any, engine_of: Callable[[Any], Engine]) -> None:
    """Wrap the public functions of ``horovod.torch``, once per process; for ``engine_of`` see
    :func:`.wrap_factory`."""
    factory = hvd.DistributedOptimizer
    if hasattr(factory, "__wrapped_by_hvd_compress__"):
        return
    make_engine = functools.partial(HorovodEngine, hvd)
    hvd.DistributedOptimizer = wrap_factory(hvd, factory, make_engine, engine_of)
    hvd.optimizer.DistributedOptimizer = hvd.DistributedOptimizer
    broadcast = hvd.broadcast_optimizer_state

    @functools.wraps(broadcast)
    def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
        if isinstance(optimizer, CompressedOptimizer):
            checkpoint.broadcast_optimizer_state(optimizer, root_rank, model)
        elif isinstance(optimizer, LocalStepsOptimizer):
            broadcast_training_state(hvd, optimizer, root_rank)
        else:
            broadcast(optimizer, root_rank, model)

    hvd.broadcast_optimizer_state = broadcast_optimizer_state
    hvd.functions.broadcast_optimizer_state = broadcast_optimizer_state
    hvd.elastic.state.broadcast_optimizer_state = broadcast_optimizer_state

    for name in ("allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter"):
        setattr(hvd, name, take_stateless(getattr(hvd, name), hvd.Compression))
    advice = ", for instance with DistributedSampler(..., drop_last=True)"
    hvd.join = checked_join(hvd.join, bound_optimizers, advice)

    state = hvd.elastic.state
    handler = checkpoint.elastic_handler(state.StateHandler)
    local_handler = checkpoint.local_elastic_handler(state.OptimizerStateHandler)
    handlers = [(CompressedOptimizer, handler), (LocalStepsOptimizer, local_handler)]
    state.set_handler_registry([*handlers, *state.get_handler_registry()])
    watch_grad_scaler()


def watch_grad_scaler() -> None:
    """Wrap the methods of ``torch.amp.GradScaler``, once."""
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
        if isinstance(optimizer, LocalStepsOptimizer):
            steps = optimizer.training.step
            result = step(self, optimizer, *args, **kwargs)
            if optimizer.training.step == steps:
                optimizer.skip_step()
            return result
        this_thread.scaler_steps = True
        try:
            result = step(self, optimizer, *args, **kwargs)
        finally:
            this_thread.scaler_steps = False
        if isinstance(optimizer, CompressedOptimizer):
            optimizer.end_step()
        return result

    watched_step._hvd_compress = True  # type: ignore[attr-defined]
    cls.unscale_, cls.step = watched_unscale_, watched_step
