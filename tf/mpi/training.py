"""Tapes and optimizers over MPI."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from hvd_compress.integrations.environment import chosen
from hvd_compress.mpi.process_sets import ProcessSet, global_process_set, rank

from .. import optimizer as _optimizer
from .. import tape
from . import collectives
from .collectives import Average, Compression
from .engine import runtime

allreduce = tape.wrap_allreduce(runtime, collectives.allreduce, several=False)
grouped_allreduce = tape.wrap_allreduce(runtime, collectives.grouped_allreduce, several=True)
bind = tape.binder(runtime, "hvd_compress.tensorflow.mpi")


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
    *,
    seed: int = 0,
) -> Any:
    """Return a tape whose ``gradient`` averages over the ranks::

        tape = hvd.DistributedGradientTape(tape, compression=hvd.DGC(momentum=0.9))

    Args:
        gradtape: a ``tf.GradientTape``, after its ``with`` statement.
        device_dense, device_sparse: where exchanges are computed, as for ``tf.device``; messages
            are sent from host memory.
        compression: a method such as ``hvd.DGC(momentum=0.9)``, its class, its name, a text, or the
            result of ``hvd.bind``.
        sparse_as_dense: make sparse gradients dense before they are exchanged.
        op: ``hvd.Average`` or ``hvd.Sum``.
        gradient_predivide_factor: divide by it before adding and by the rest afterwards.
        num_groups, groups: variables that are exchanged together: a number of groups, or lists.
        process_set: the ranks that take part.
        scale_local_gradients: gradients of local sources are divided by the number of ranks.
        seed: for randomness that the ranks share.
    """
    options = dict(locals())
    rank()  # says if init() is missing
    options["compression"] = chosen(compression, Compression.none, rank)
    return tape.distribute_tape(bind, options)


def PartialDistributedGradientTape(  # noqa: N802, Horovod's name
    gradtape: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return :func:`DistributedGradientTape` that keeps the gradients of layers on their rank.

    Args:
        gradtape, args, options: as for :func:`DistributedGradientTape`, which has the errors, too.
        local_layers: a layer of Keras, or several; ``None`` for none.
    """
    new = DistributedGradientTape(gradtape, *args, **options)
    for variable in _optimizer.weights_of(local_layers):
        new.register_local_source(variable)
    return new


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
    *,
    seed: int = 0,
    method: Any = None,
) -> Any:
    """Return a new optimizer of Keras that steps along compressed averages over the ranks::

        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvd.TopK(0.01))

    With ``method=hvd.LocalSGD(sync_every=8)`` it trains by that method instead.

    Args:
        optimizer: of Keras 3, or of tf_keras.
        name: of the new one.
        backward_passes_per_step: number of passes whose gradients are added up before they are
            exchanged; with ``average_aggregated_gradients`` they are averaged.
        device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            num_groups, groups, process_set, scale_local_gradients, seed: as for
            :func:`DistributedGradientTape`.
        method: a training method, for Keras 3, which sends no gradients and takes no options of
            these.
    """
    options = dict(locals())
    rank()  # says if init() is missing
    if method is not None:
        signature = inspect.signature(DistributedOptimizer)
        from hvd_compress.systems.base import train_by_method

        training = importlib.import_module("hvd_compress.tensorflow.keras.mpi.training")
        return train_by_method(training.train, signature, options)
    del options["method"]
    options["compression"] = chosen(compression, Compression.none, rank)
    return _optimizer.distribute(runtime, **options)


def PartialDistributedOptimizer(  # noqa: N802, Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **options: Any
) -> Any:
    """Return :func:`DistributedOptimizer` that keeps the gradients of layers on their rank.

    Args:
        optimizer, args, options: as for :func:`DistributedOptimizer`, whose errors these are, too.
        local_layers: a layer of Keras, or several; ``None`` for none.
    """
    new = DistributedOptimizer(optimizer, *args, **options)
    for variable in _optimizer.weights_of(local_layers):
        new.register_local_var(variable)
    return new
