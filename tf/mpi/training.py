"""Tapes and optimizers over MPI: Horovod's signatures, for which this package makes both."""

from __future__ import annotations

import functools
from typing import Any

from hvd_compress.mpi.process_sets import ProcessSet, global_process_set

from ..distribute import wrap_optimizer
from ..tape import binder, wrap_allreduce, wrap_tape
from . import collectives
from .collectives import Average, Compression
from .engine import runtime

__all__ = [
    *("DistributedGradientTape", "DistributedOptimizer", "PartialDistributedGradientTape"),
    *("allreduce", "bind", "grouped_allreduce"),
]

bind = binder(runtime, __package__)
allreduce = wrap_allreduce(runtime, collectives.allreduce, several=False)
grouped_allreduce = wrap_allreduce(runtime, collectives.grouped_allreduce, several=True)


@functools.partial(wrap_tape, runtime, bind)
def DistributedGradientTape(  # noqa: N802, Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Options are those of Horovod, in their places.

    Args:
        gradtape: a ``tf.GradientTape``, after its ``with`` statement.
        device_dense, device_sparse: where exchanges are computed, as for ``tf.device``; messages
            are sent from host memory.
        sparse_as_dense: make sparse gradients dense before they are exchanged.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: divide by it before adding and by the rest afterwards.
        num_groups, groups: variables that are exchanged together: a number of groups, or lists.
        process_set: the ranks that take part.
        scale_local_gradients: gradients of local sources are divided by the number of ranks.
    """


@functools.partial(wrap_optimizer, runtime)
def DistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: str = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Options are those of Horovod, in their places.

    Args:
        name: of the new one.
        backward_passes_per_step: number of passes whose gradients are added up before they are
            exchanged; with ``average_aggregated_gradients`` they are averaged.
        num_groups, process_set, scale_local_gradients: as for ``DistributedGradientTape``.
    """


PartialDistributedGradientTape = wrap_tape(
    runtime, bind, DistributedGradientTape.__wrapped__, local_layers=None
)
PartialDistributedOptimizer = wrap_optimizer(
    runtime, DistributedOptimizer.__wrapped__, local_layers=None
)
PartialDistributedGradientTape.__name__ = "PartialDistributedGradientTape"
PartialDistributedOptimizer.__name__ = "PartialDistributedOptimizer"
