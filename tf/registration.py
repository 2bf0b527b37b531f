"""Registration with Horovod, so that ``import horovod.tensorflow as hvd`` works with this package.

The public functions that take a compressor are wrapped when this package is imported.  Calls
without this package's compressors are passed on unchanged, after ranks have compared
HVD_COMPRESSION.  No file of Horovod is changed; docs/design.md lists the private parts that are
replaced.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from hvd_compress.errors import UnsupportedError
from hvd_compress.integrations.horovod import (
    bind_call,
    checked_join,
    hand_on,
    in_place_of,
    take_stateless,
    with_options,
)

from . import elastic
from .binding import Binding
from .engine import gather_bytes, runtime
from .optimizer import distribute, is_keras_3, is_tf_keras
from .slots import native
from .tape import binder, check_compression, is_ours, wrap_allreduce, wrap_tape

_DONE = "__wrapped_by_hvd_compress__"

bind = binder(runtime, "hvd_compress.tensorflow")


def register(hvd: Any) -> None:
    """Wrap the public functions of ``horovod.tensorflow``, once per process."""
    if hasattr(hvd, _DONE):
        return
    setattr(hvd, _DONE, True)
    hvd.allreduce = wrap_allreduce(runtime, hvd.allreduce, several=False)
    hvd.grouped_allreduce = wrap_allreduce(runtime, hvd.grouped_allreduce, several=True)
    hvd.DistributedGradientTape = wrap_tape(hvd, bind, hvd.DistributedGradientTape, gather_bytes)
    hvd.DistributedOptimizer = wrap_optimizer(hvd.DistributedOptimizer)
    broadcast = hvd.broadcast_variables

    @functools.wraps(broadcast)
    def broadcast_variables(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return broadcast([native(variable) for variable in variables], *args, **kwargs)

    hvd.broadcast_variables = broadcast_variables
    hvd.join = checked_join(hvd.join, Binding.alive, "")
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
            setattr(hvd, name, wrap_optimizer(getattr(hvd, name)))
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


def wrap_optimizer(
    factory: Callable[..., Any], for_keras: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return Horovod's ``DistributedOptimizer`` that takes this package's compressors as well.

    Args:
        for_keras: for our own modules, Horovod's factory of optimizers of Keras, to which
            ``factory`` hands only some of its options.  It makes those of tf_keras; those of Keras
            3 are all made here, since Horovod's own do not exchange gradients there.
    """
    signature = with_options(factory, seed=0, method=None)

    @in_place_of(factory)
    def DistributedOptimizer(*args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Return a new optimizer like ``optimizer`` that steps along compressed averages over the
        ranks::

            sgd = keras.optimizers.SGD(0.1)
            optimizer = hvd.DistributedOptimizer(sgd, compression=hvd.TopK(density=0.01))

        Args:
            optimizer: of Keras 3, or of tf_keras.
            compression: a method such as ``hvd.DGC``, an instance, its name, or a text such as
                "dgc:density=0.01"; then, and under Keras 3, the optimizer is this package's.  With
                Horovod's own those of tf_keras are Horovod's.  ``HVD_COMPRESSION`` names a default.
            op: ``hvd.Average`` or ``hvd.Sum``.
            groups: variables that are sent together, as in Horovod.
            sparse_as_dense: make sparse gradients dense before they are exchanged.
            gradient_predivide_factor: divide by it before adding and by the rest afterwards.
            device_dense, device_sparse: where exchanges are computed, as for ``tf.device``.
            seed: for randomness that the ranks share.
            method: a training method, such as ``hvd.LocalSGD(sync_every=8)``, instead; Keras 3.

        Raises:
            MismatchError: ranks differ in method, options or variables; mostly in the first step,
                where TensorFlow shows it inside of an error of its own.
        """
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("method") is not None:
            from hvd_compress.systems.base import train_by_method

            given.apply_defaults()
            training = importlib.import_module("hvd_compress.tensorflow.keras.training")
            return train_by_method(training.train, signature, given.arguments)
        call = bind_call(signature, args, kwargs, runtime.hvd, gather_bytes)
        del call.arguments["method"]
        options = dict(call.arguments)
        optimizer = options.pop("optimizer")
        check_compression(options["compression"])
        if is_ours(options["compression"]) or (for_keras and is_keras_3(optimizer)):
            options.pop("use_locking", None)
            return distribute(runtime, optimizer, **options)
        if for_keras and is_tf_keras(optimizer):
            return hand_on(for_keras, call.arguments)
        return hand_on(factory, call.arguments)

    DistributedOptimizer.__signature__ = signature
    return DistributedOptimizer
