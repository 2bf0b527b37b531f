"""``DistributedOptimizer`` for Keras 3 and for tf_keras.

Horovod's own relies on hooks that Keras 3 no longer calls: under ``model.fit`` every rank trains
alone.  Here a class is made from the class of the user's optimizer, with its name, so that saved
models load without this package; it averages the gradients in ``apply``, which Keras always calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_compress.base import Compressor
from hvd_compress.chain import chain
from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations.optimizers import (
    another_kind,
    check_one_momentum,
    check_partner,
    moved,
    velocity_of_one,
)
from hvd_compress.integrations.options import HorovodOptions
from hvd_compress.meetings import allreduce
from hvd_compress.methods import FP16, NoCompression, as_fixed
from hvd_compress.transforms import momentum_after_averaging

from .binding import Binding
from .common_values import numbers_of, sample_of
from .contexts import check_context
from .loss_scaling import NotInLossScaling
from .runtime import Common, Runtime
from .saved_state import state_on_disk
from .slots import native, places_of_groups, slots_of

logger = logging.getLogger("hvd_compress")
_COPY = (
    "make the plain optimizer from it, type(optimizer).__bases__[-1].from_config("
    "optimizer.get_config()), and pass that to hvd.DistributedOptimizer"
)


def is_keras_3(optimizer: Any) -> bool:
    """Return whether an optimizer is one of the package ``keras``, version 3 or later."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(optimizer, keras.optimizers.Optimizer)


def is_tf_keras(optimizer: Any) -> bool:
    """Return whether an optimizer is one of the package ``tf_keras``, Keras 2, and not of its
    ``optimizers.legacy``."""
    tf_keras = sys.modules.get("tf_keras")
    return tf_keras is not None and isinstance(optimizer, tf_keras.optimizers.Optimizer)


def is_legacy(optimizer: Any) -> bool:
    """Return whether an optimizer is one of ``tf_keras.optimizers.legacy``."""
    tf_keras = sys.modules.get("tf_keras")
    return tf_keras is not None and isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer)


def as_ours(compression: Any) -> Compressor:
    """Return this package's method for a value of ``compression=``, Horovod's own included."""
    if compression is None:
        return NoCompression()
    horovods = {"NoneCompressor": NoCompression(), "FP16Compressor": FP16()}
    name = getattr(compression, "__name__", type(compression).__name__)
    return horovods[name] if name in horovods else as_fixed(compression)


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

    Raises:
        ConfigError, UnsupportedError: options that do not go together.
    """
    method = as_ours(compression)
    options = HorovodOptions.checked(runtime.hvd, method, groups=groups or num_groups, **shared)
    if isinstance(optimizer, CompressedOptimizer):
        raise ConfigError(
            "this optimizer is distributed already; pass the one that it was made from"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "gradient_accumulation_steps", None):
        raise ConfigError(
            "gradient_accumulation_steps adds up what was exchanged already, and momentum would "
            "act at every part of a step: pass backward_passes_per_step="
            f"{inner.gradient_accumulation_steps} and average_aggregated_gradients=True to "
            "hvd.DistributedOptimizer instead"
        )
    if method.weight_decay == "gradient":
        raise ConfigError(
            "weight_decay='gradient' has no meaning with Keras, whose optimizers keep decay out of "
            "the gradient: leave it out"
        )
    if is_keras_3(optimizer):
        mixin: type[CompressedOptimizer] = Keras3Optimizer
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
    new._hvd_setup(
        runtime,
        method,
        options,
        average_passes=average_aggregated_gradients,
        scale_local=scale_local_gradients,
    )
    for variable in weights_of(local_layers):
        new.register_local_var(variable)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "built", getattr(inner, "_built", False)):
        new._hvd_take_over(optimizer)
    return new


def weights_of(layers: Any) -> list[Any]:
    """Return the trainable weights of a layer, or of several."""
    layers = [] if layers is None else layers if isinstance(layers, list | tuple) else [layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ConfigError(f"local_layers must be layers of Keras; got {type(layer).__name__}")
    return [variable for layer in layers for variable in layer.trainable_weights]


def _with_loss_scale(optimizer: Any) -> Any:
    """Return the optimizer, with loss scaling under float16.  Keras would wrap it later, and then
    look for NaN and Inf before gradients are averaged: some ranks would step, and others wait for
    them."""
    import keras

    if keras.backend.backend() != "tensorflow":
        raise UnsupportedError(
            f"Keras runs on {keras.backend.backend()} here, and its gradients never pass through "
            "TensorFlow: set KERAS_BACKEND=tensorflow; or, with torch, write the training loop "
            "yourself and use hvd_compress.torch"
        )
    half = keras.config.dtype_policy().name == "mixed_float16"
    if half and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


class CompressedOptimizer(NotInLossScaling):
    """``isinstance(optimizer, CompressedOptimizer)``: made by :func:`distribute`.

    Attributes:
        compression: a :class:`hvd_compress.tensorflow.binding.Binding`, once it is built.
    """

    _hvd_instead_of_scaling = (
        "a distributed optimizer inside of a LossScaleOptimizer would step on some ranks only: "
        "write hvd.DistributedOptimizer(LossScaleOptimizer(optimizer)) before model.compile, or "
        "set the policy mixed_float16 before hvd.DistributedOptimizer"
    )

    def _hvd_setup(
        self,
        runtime: Runtime,
        method: Compressor,
        options: HorovodOptions,
        *,
        average_passes: bool,
        scale_local: bool,
    ) -> None:
        self._hvd_runtime = runtime
        self._hvd_method = method
        self._hvd_options = options
        self._hvd_passes = options.backward_passes_per_step
        self._hvd_average_passes = average_passes
        self._hvd_scale_local = scale_local
        self._hvd_local: set[int] = set()
        self._hvd_places: dict[int, int] = {}
        self._hvd_epoch: int | None = None
        self._hvd_built = False
        self._hvd_may_be_wrapped = False
        self._hvd_check_momentum()

    def __getattr__(self, name: str) -> Any:
        hint = ""
        if name == "compression":
            hint = ": it is there after the first step, or optimizer.build(trainable_variables)"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @classmethod
    def from_config(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"a configuration holds no compression and no ranks: {_COPY}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(f"a distributed optimizer is not copied or pickled: {_COPY}")

    def set_compression_epoch(self, epoch: int) -> None:
        """Announce the epoch, for schedules by epoch; this may be before the optimizer is built."""
        self._hvd_epoch = epoch
        if self._hvd_built:
            self.compression.set_epoch(epoch)

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of this variable on this rank; call this before the optimizer is
        built."""
        if self._hvd_built:
            raise ConfigError("register_local_var() must be called before the first step")
        self._hvd_local.add(id(native(variable)))

    def _hvd_inner(self) -> Any:  # no property: Keras would look for variables behind it
        """Return the optimizer that steps, inside of loss scaling."""
        return getattr(self, "inner_optimizer", self)

    def _hvd_check_momentum(self) -> None:
        method, inner = self._hvd_method, self._hvd_inner()
        check_partner(method, inner, None)
        if method.partner == "ZeroOneAdam" and inner is not self:
            raise ConfigError(
                "local steps and loss scaling do not go together, since a rank alone cannot skip a "
                "step: use bfloat16 or float32, or hvd.OneBitAdam"
            )
        if not method.takes_momentum:
            return
        own, momentum = method.momentum, getattr(inner, "momentum", 0.0)
        wrapped = type(inner).__name__
        is_chief = self._hvd_runtime.hvd.rank() == 0
        if not self._hvd_takes_momentum:
            if own is None and is_chief:
                warnings.warn(another_kind(method, wrapped), UserWarning, stacklevel=5)
            return
        check_one_momentum(method, momentum)
        if own is None and momentum and is_chief:
            logger.info("%s", moved(method, [momentum], inner.nesterov, wrapped))

    @property
    def _hvd_takes_momentum(self) -> bool:
        is_sgd = any(cls.__name__ == "SGD" for cls in type(self._hvd_inner()).__mro__)
        return self._hvd_method.takes_momentum and is_sgd

    def _hvd_bind(self, variables: Sequence[Any]) -> None:
        shared = [v for v in variables if id(native(v)) not in self._hvd_local]
        self._hvd_places = {id(native(v)): i for i, v in enumerate(shared)}
        inner, takes = self._hvd_inner(), self._hvd_takes_momentum
        options = self._hvd_options
        self.compression = Binding(
            self._hvd_runtime,
            self._hvd_method,
            slots_of(shared),
            dataclasses.replace(options, groups=places_of_groups(options.groups, shared)),
            momentum=float(inner.momentum) if takes else 0.0,
            nesterov=inner.nesterov if takes else False,
        )
        if self._hvd_method.partner is not None:
            inner.follow(self.compression, self._hvd_places)
        local = [v for v in variables if id(native(v)) in self._hvd_local]
        self._hvd_local_places = {id(native(v)): i for i, v in enumerate(local)}
        if takes and local:  # their momentum is off with that of all others
            after = momentum_after_averaging(*self.compression.momentum_used())
            self.local_compression = Binding(
                self._hvd_runtime, chain(after, via=allreduce()), slots_of(local), alone=True
            )
        if self._hvd_epoch is not None:
            with tf.init_scope():
                self.compression.set_epoch(self._hvd_epoch)
        self._hvd_built = True
        if self._hvd_passes > 1:
            with tf.init_scope():
                self._hvd_sums = {
                    id(native(v)): tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
                    for v in variables
                }
                self._hvd_count = tf.Variable(0, trainable=False, dtype=tf.int64)

    def _hvd_average(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return averages in place of gradients, but for local variables."""
        results = [_plain(gradient) for gradient in gradients]
        keys = [id(native(variable)) for variable in variables]
        shared = [j for j, key in enumerate(keys) if key in self._hvd_places]
        local = [j for j, key in enumerate(keys) if key in self._hvd_local_places]
        scale = native(self.dynamic_scale).value() if hasattr(self, "dynamic_scale") else None
        averages = self.compression.reduce(
            [results[j] for j in shared],
            [self._hvd_places[keys[j]] for j in shared],
            scale,
            self._hvd_common([variables[j] for j in shared]),
        )
        for j in local:
            if self._hvd_scale_local and results[j] is not None:
                results[j] = tf.convert_to_tensor(results[j]) / self.compression.engine.size
        if hasattr(self, "local_compression"):
            own = self.local_compression.reduce(
                [results[j] for j in local], [self._hvd_local_places[keys[j]] for j in local], scale
            )
            averages, shared = [*averages, *own], [*shared, *local]
        for j, average in zip(shared, averages, strict=True):
            results[j] = average
        return results

    def _hvd_common(self, variables: Sequence[Any]) -> list[Common]:
        """Return what the ranks must have in common."""
        inner = self._hvd_inner()
        numbers = numbers_of(self.compression, inner)
        if hasattr(inner, "synchronize_parameters"):  # lets weights differ for some steps
            return [numbers]
        return [numbers, sample_of(self.compression, variables)]

    @contextlib.contextmanager
    def _hvd_momentum_off(self) -> Iterator[None]:
        """Switch off momentum that has acted inside the exchange already."""
        inner = self._hvd_inner()
        if not self._hvd_takes_momentum:
            yield
            return
        own = inner.momentum, inner.nesterov
        inner.momentum, inner.nesterov = 0.0, False
        try:
            yield
        finally:
            inner.momentum, inner.nesterov = own

    def _hvd_step(
        self, gradients: list[Any], variables: list[Any], step: Callable[[list[Any]], Any]
    ) -> None:
        """Average and step; after as many backward passes as the user asked for."""
        for variable in variables:
            if id(native(variable)) not in self._hvd_places | self._hvd_local_places:
                raise ConfigError(
                    f"{variable.name} came after this optimizer was built: build the model first, "
                    "or make a new optimizer"
                )

        def exchange(gradients: list[Any]) -> None:
            averages = self._hvd_average(gradients, variables)
            with self._hvd_momentum_off():
                step(averages)

        if self._hvd_passes == 1:
            exchange(gradients)
            return
        sums = [self._hvd_sums[id(native(variable))] for variable in variables]
        for total, gradient in zip(sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                if not self._hvd_options.sparse_as_dense:
                    raise ConfigError(
                        "gradients of some rows cannot be added up over backward passes: pass "
                        "sparse_as_dense=True, or backward_passes_per_step=1"
                    )
                gradient = tf.convert_to_tensor(gradient)
            if gradient is not None:
                total.assign_add(gradient)
        self._hvd_count.assign_add(1)

        def all_passes() -> tf.Tensor:
            passes = self._hvd_passes if self._hvd_average_passes else 1
            exchange(
                [
                    None if gradient is None else total.value() / passes
                    for total, gradient in zip(sums, gradients, strict=True)
                ]
            )
            for total in sums:
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        tf.cond(
            tf.equal(self._hvd_count % self._hvd_passes, 0), all_passes, lambda: tf.constant(False)
        )


class Keras3Optimizer(CompressedOptimizer):
    """Mixed into the class of an optimizer of Keras 3."""

    def build(self, variables: Sequence[Any]) -> None:
        if self._hvd_built:
            return
        super().build(variables)  # type: ignore[misc]
        self._hvd_bind(variables)
        self.compression_on_disk = state_on_disk(self.compression)
        if hasattr(self, "local_compression"):
            self.local_compression_on_disk = state_on_disk(self.local_compression)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is None and not self._hvd_built:
            super().apply(grads)  # type: ignore[misc]  # raises
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        if not self._hvd_built:
            import keras

            with keras.name_scope(self.name):
                self.build(variables)
        step = super().apply  # type: ignore[misc]
        self._hvd_step(list(grads), variables, lambda averages: step(averages, variables))

    def save_own_variables(self, store: Any) -> None:
        """Save the variables with momentum as plain Keras would have it, so that it can go on."""
        own: dict[str, Any] = {}
        super().save_own_variables(own)  # type: ignore[misc]
        places = {id(variable): str(i) for i, variable in enumerate(self.variables)}
        for slot, velocity, factor in self._hvd_velocities():
            own[places[id(slot)]] = (velocity.numpy() * factor).reshape(slot.shape)
        for name, array in own.items():
            store[name] = array

    def _hvd_take_over(self, optimizer: Any) -> None:
        """Take over the state of the optimizer that this one is made from."""
        old, new = getattr(optimizer, "inner_optimizer", optimizer), self._hvd_inner()
        self.build(old._trainable_variables)
        pairs = list(zip(new.variables, old.variables, strict=True))
        if old is not optimizer and optimizer.built:  # the scale
            pairs += zip(self._variables, optimizer._variables, strict=True)
        for own, theirs in pairs:
            own.assign(theirs)
        for slot, velocity, factor in self._hvd_velocities():
            if factor:  # at the start of a warm-up the rate may be zero, and so is the slot
                velocity.assign(tf.reshape(native(slot).value(), [-1]) / factor)

    def _hvd_velocities(self) -> Iterator[tuple[Any, tf.Variable, float]]:
        """Yield momentum slots that are off, the velocities that act in their place, and the slot
        for a velocity of 1: Keras's slots contain the learning rate, and our velocities, if
        Nesterov, the momentum."""
        inner = self._hvd_inner()
        if not self._hvd_takes_momentum or not getattr(inner, "momentums", None):
            return
        momentum, nesterov = self.compression.momentum_used()
        if not momentum:
            return
        factor = -float(np.asarray(inner.learning_rate)) / velocity_of_one(momentum, nesterov)
        if self._hvd_options.op == self._hvd_runtime.hvd.Sum:  # velocities are of averages
            factor *= self.compression.engine.size
        for variable, slot in zip(self._trainable_variables, inner.momentums, strict=True):
            place = self._hvd_places.get(id(native(variable)))
            if place is not None and "velocity" in self.compression.states[str(place)]:
                yield slot, self.compression.states[str(place)]["velocity"], factor


class TfKerasOptimizer(CompressedOptimizer):
    """Mixed into the class of an optimizer of tf_keras."""

    def build(self, var_list: Sequence[Any]) -> None:
        super().build(var_list)  # type: ignore[misc]
        if not self._hvd_built:
            self._hvd_bind(var_list)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        with tf.init_scope():
            self.build(variables)
        step = super().apply_gradients  # type: ignore[misc]
        self._hvd_step(
            gradients,
            variables,
            lambda averages: step(zip(averages, variables, strict=True), *args, **kwargs),
        )
        return self.iterations

    def _hvd_take_over(self, optimizer: Any) -> None:
        raise UnsupportedError(
            "this optimizer has been used already, and its state would be lost: pass a new one, "
            "and load its state from a checkpoint"
        )


def made_like(optimizer: Any, mixin: type) -> Any:
    """Return a new optimizer of a class made from that of ``optimizer``, with the options of it."""
    base = type(optimizer)
    cls: Any = type(base.__name__, (mixin, base), {"__module__": base.__module__})
    config = optimizer.get_config()
    rate = getattr(optimizer, "_learning_rate", None)
    if callable(rate):  # a schedule of the user's own, which Keras would not find by its name
        config["learning_rate"] = rate
    new = base.from_config.__func__(cls, config)  # the mixin's own refuses
    old, inner = (getattr(o, "inner_optimizer", o) for o in (optimizer, new))
    for excluded in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(old, excluded):  # not in the configuration
            setattr(inner, excluded, getattr(old, excluded))
    return new


def _plain(gradient: Any) -> Any:
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    return tf.convert_to_tensor(gradient)
