"""Registration with Horovod, so that ``import horovod.tensorflow as hvd`` works with this package.

The public functions that take a compressor are wrapped when this package is imported.  Calls
without this package's compressors are passed on unchanged, after ranks have compared
HVD_COMPRESSION.  No file of Horovod is changed; docs/design.md lists the private parts that are
replaced.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.integrations.horovod import checked_join, take_stateless

from . import elastic
from .binding import VariableBinding
from .distribute import is_keras_3, wrap_optimizer
from .engine import runtime
from .slots import native
from .tape import binder, wrap_allreduce, wrap_tape

_DONE = "__wrapped_by_hvd_compress__"

bind = binder(runtime, "hvd_compress.tensorflow")


def register(hvd: Any) -> None:
    """Wrap the public functions of ``horovod.tensorflow``, once per process."""
    if hasattr(hvd, _DONE):
        return
    setattr(hvd, _DONE, True)
    hvd.allreduce = wrap_allreduce(runtime, hvd.allreduce, several=False)
    hvd.grouped_allreduce = wrap_allreduce(runtime, hvd.grouped_allreduce, several=True)
    hvd.DistributedGradientTape = wrap_tape(runtime, bind, hvd.DistributedGradientTape)
    hvd.DistributedOptimizer = wrap_optimizer(runtime, hvd.DistributedOptimizer)
    broadcast = hvd.broadcast_variables

    @functools.wraps(broadcast)
    def broadcast_variables(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return broadcast([native(variable) for variable in variables], *args, **kwargs)

    hvd.broadcast_variables = broadcast_variables
    hvd.join = checked_join(hvd.join, VariableBinding.alive, "")
    for name in ("reducescatter", "grouped_reducescatter"):
        setattr(hvd, name, take_stateless(getattr(hvd, name), hvd.Compression))
    hvd.elastic.TensorFlowKerasState = elastic.TensorFlowKerasState
    hvd.elastic.run = elastic.wrap_run(hvd.elastic.run)
    _guard(importlib.import_module("horovod._keras"))


def register_keras(hvd: Any, replacements: Mapping[str, Mapping[str, Any]]) -> None:
    """Wrap the functions that meet an optimizer in ``horovod.tensorflow.keras`` or
    ``horovod.keras``.

    Args:
        replacements: by submodule, classes that know Keras 3, for those that do not.
    """
    if hasattr(hvd, _DONE):
        return
    setattr(hvd, _DONE, True)
    for name in ("DistributedOptimizer", "PartialDistributedOptimizer"):
        if hasattr(hvd, name):
            setattr(hvd, name, wrap_optimizer(runtime, getattr(hvd, name)))
    for module, classes in replacements.items():
        for name, cls in classes.items():
            setattr(getattr(hvd, module), name, cls)


def _guard(impl: Any) -> None:
    """Replace the function that makes all of Horovod's optimizers for Keras, also for those who
    imported Horovod's before it was wrapped."""
    make = impl.create_distributed_optimizer

    @functools.wraps(make)
    def create_distributed_optimizer(keras: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if is_keras_3(optimizer):
            raise UnsupportedError(
                "Horovod's own DistributedOptimizer does not exchange gradients under Keras 3: "
                "every rank would train for itself. Write `import hvd_compress.tensorflow.keras as "
                "hvd`, whose DistributedOptimizer does; or, after the import of hvd_compress, "
                "compression=hvd_compress.NoCompression"
            )
        return make(keras, optimizer, *args, **kwargs)

    impl.create_distributed_optimizer = create_distributed_optimizer
