"""``DistributedOptimizer``: its options and their checks, and which class steps by them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import tensorflow as tf

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.horovod import hand_on, in_place_of, refuse_nodes, with_options
from hvd_compress.integrations.options import HorovodOptions
from hvd_compress.methods import FP16, NoCompression
from hvd_compress.methods.optimizers import check_partner
from hvd_compress.methods.texts import as_fixed

from .optimizer import (
    Distribution,
    Keras3Optimizer,
    KerasCompressedOptimizer,
    NotInLossScaling,
    TfKerasOptimizer,
    inner_of,
    made_like,
)
from .runtime import Runtime, check_context
from .slots import weights_of
from .tape import is_ours


def _is_of(package: str, classes: str, optimizer: Any) -> bool:
    """Return whether an optimizer is one of a package, which need not be there."""
    module = sys.modules.get(package)
    return module is not None and isinstance(optimizer, attrgetter(classes)(module))


#: of the package ``keras``, version 3 or later; of ``tf_keras``, Keras 2; and of its legacy ones
is_keras_3 = functools.partial(_is_of, "keras", "optimizers.Optimizer")
is_tf_keras = functools.partial(_is_of, "tf_keras", "optimizers.Optimizer")
is_legacy = functools.partial(_is_of, "tf_keras", "optimizers.legacy.Optimizer")


def as_ours(compression: Any) -> Compressor:
    """Return this package's method for a value of ``compression=``, Horovod's own included."""
    if compression is None:
        return NoCompression()
    horovods = {"NoneCompressor": NoCompression(), "FP16Compressor": FP16()}
    name = getattr(compression, "__name__", type(compression).__name__)
    return horovods[name] if name in horovods else as_fixed(compression)


def wrap_optimizer(
    runtime: Runtime,
    factory: Callable[..., Any],
    for_keras: Callable[..., Any] | None = None,
    **more: Any,
) -> Any:
    """Return a factory with the signature of Horovod's ``DistributedOptimizer``, and options
    ``more`` with their defaults, whose optimizers take this package's compressors.

    Args:
        for_keras: for our own modules, Horovod's factory of optimizers of Keras, to which
            ``factory`` hands only some of its options.  It makes those of tf_keras; those of Keras
            3 are all made here, since Horovod's own do not exchange gradients there.
    """
    signature = with_options(factory, seed=0, method=None, **more)

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
            local_layers: layers of Keras whose gradients stay on their rank, for
                ``PartialDistributedOptimizer``.

        Raises:
            MismatchError: ranks differ in method, options or variables; mostly in the first step,
                where TensorFlow shows it inside of an error of its own.
        """
        refuse_nodes(kwargs)
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("method") is not None:
            from hvd_compress.systems.base import train_by_method

            given.apply_defaults()
            training = importlib.import_module("hvd_compress.tensorflow.keras.local_training")
            train = functools.partial(training.train_locally, runtime)
            return train_by_method(train, signature, given.arguments)
        options = runtime.arguments(signature, args, kwargs)
        del options["method"]
        optimizer = options["optimizer"]
        is_own = is_ours(runtime, options["compression"])
        if is_own or (for_keras and is_keras_3(optimizer)):
            options.pop("use_locking", None)
            return distribute(runtime, **options)
        return hand_on(for_keras if for_keras and is_tf_keras(optimizer) else factory, options)

    DistributedOptimizer.__signature__ = signature
    return DistributedOptimizer


def distribute(
    runtime: Runtime,
    optimizer: Any,
    name: str | None = None,
    *,
    compression: Any = None,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    scale_local_gradients: bool = True,
    local_layers: Any = None,
    **shared: Any,
) -> Any:
    """Return a new optimizer like ``optimizer`` that averages gradients over the ranks.

    Args: as Horovod's; ``runtime`` carries the exchanges; ``compression`` also takes this package's
        methods; ``shared`` are those of :class:`HorovodOptions`.
    """
    method = as_ours(compression)
    options = HorovodOptions.checked(runtime.hvd, method, groups=groups or num_groups, **shared)
    check_not_distributed(optimizer)
    if steps := getattr(inner_of(optimizer), "gradient_accumulation_steps", None):
        raise ConfigError(
            "gradient_accumulation_steps adds up what was exchanged already, and momentum would "
            f"act at every part of a step: pass backward_passes_per_step={steps} and "
            "average_aggregated_gradients=True to hvd.DistributedOptimizer instead"
        )
    if method.weight_decay == "gradient":
        raise ConfigError(
            "weight_decay='gradient' has no meaning with Keras, whose optimizers keep decay out of "
            "the gradient: leave it out"
        )
    if is_keras_3(optimizer):
        mixin: type[KerasCompressedOptimizer] = Keras3Optimizer
        check_backend()
        optimizer = _with_loss_scale(optimizer)
    elif is_tf_keras(optimizer):
        mixin = TfKerasOptimizer
    elif is_legacy(optimizer):
        raise UnsupportedError(
            "optimizers of tf_keras.optimizers.legacy are not supported: use "
            f"tf_keras.optimizers.{type(optimizer).__name__}"
        )
    elif isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise UnsupportedError(
            "optimizers of tf.compat.v1 are not supported with this package's methods: use "
            "keras.optimizers; or, eagerly or in a tf.function, hvd.DistributedGradientTape; or "
            "pass Horovod's own compression, such as hvd.Compression.fp16"
        )
    else:
        raise UnsupportedError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is no Keras optimizer; for "
            "others use hvd.DistributedGradientTape"
        )
    check_context()
    new = made_like(optimizer, mixin)
    if name is not None:
        new.name = name
    inner = inner_of(new)
    check_partner(method, inner, None)
    if method.partner == "ZeroOneAdam" and inner is not new:
        raise ConfigError(
            "local steps and loss scaling do not go together, since a rank alone cannot skip a "
            "step: use bfloat16 or float32, or hvd.OneBitAdam"
        )
    new.distribution = Distribution(
        runtime,
        method,
        options,
        inner,
        average_passes=average_aggregated_gradients,
        scale_local=scale_local_gradients,
    )
    new.may_be_wrapped = False
    for variable in weights_of(local_layers):
        new.register_local_var(variable)
    old = inner_of(optimizer)
    if getattr(old, "built", getattr(old, "_built", False)):
        new.take_over(optimizer)
    return new


def check_not_distributed(optimizer: Any) -> None:
    """Raise ``ConfigError`` for an optimizer that was made by :func:`made_like`."""
    if isinstance(optimizer, NotInLossScaling):
        raise ConfigError(
            "this optimizer is distributed already; pass the one that it was made from"
        )


def check_backend() -> None:
    """Raise ``UnsupportedError`` unless Keras 3 runs on TensorFlow."""
    import keras

    if keras.backend.backend() != "tensorflow":
        raise UnsupportedError(
            f"Keras runs on {keras.backend.backend()} here, and its gradients never pass through "
            "TensorFlow: set KERAS_BACKEND=tensorflow; or, with torch, write the training loop "
            "yourself and use hvd_compress.torch"
        )


def _with_loss_scale(optimizer: Any) -> Any:
    """Return the optimizer, with loss scaling under float16.  Keras would wrap it later, and then
    look for NaN and Inf before gradients are averaged: some ranks would step, and others wait for
    them."""
    import keras

    half = keras.config.dtype_policy().name == "mixed_float16"
    if half and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer
