"""Makes Horovod's own import line work: ``import horovod.torch as hvd``.

Horovod hands a compressor neither parameters nor the optimizer, and DGC needs both.  So the public
functions that meet an optimizer are wrapped when this package is imported; calls that have nothing
to do with this package's compressors pass through untouched.  No file of Horovod is changed.
"""

from __future__ import annotations

import functools
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.torch import checkpoint
from hvd_compress.torch.amp import watch_grad_scaler
from hvd_compress.torch.distributed_optimizer import (
    CompressedOptimizer,
    bound_optimizers,
    wrap_factory,
)


def register(hvd: Any) -> None:
    """Wrap the public functions of ``horovod.torch``, once per process."""
    factory = hvd.DistributedOptimizer
    if hasattr(factory, "__wrapped_by_hvd_compress__"):
        return
    hvd.DistributedOptimizer = hvd.optimizer.DistributedOptimizer = wrap_factory(hvd, factory)
    broadcast = hvd.broadcast_optimizer_state

    @functools.wraps(broadcast)
    def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
        if isinstance(optimizer, CompressedOptimizer):
            checkpoint.broadcast(optimizer, root_rank)
        else:
            broadcast(optimizer, root_rank, model)

    hvd.broadcast_optimizer_state = broadcast_optimizer_state
    hvd.functions.broadcast_optimizer_state = broadcast_optimizer_state
    hvd.elastic.state.broadcast_optimizer_state = broadcast_optimizer_state

    join = hvd.join

    @functools.wraps(join)
    def checked_join(*args: Any, **kwargs: Any) -> Any:
        if bound_optimizers:
            raise UnsupportedError(
                "hvd.join() cannot be used with compressed gradients: Horovod's allgather does not "
                "support it. Give every rank the same number of batches, for instance with "
                "DistributedSampler(..., drop_last=True)"
            )
        return join(*args, **kwargs)

    hvd.join = checked_join

    state = hvd.elastic.state
    handler = checkpoint.elastic_handler(state.StateHandler)
    state.set_handler_registry([(CompressedOptimizer, handler), *state.get_handler_registry()])
    watch_grad_scaler()
