"""``DistributedOptimizer`` for Keras 3 and for tf_keras.

Horovod's own relies on hooks that Keras 3 no longer calls: under ``model.fit`` every rank trains
alone.  Here a class is made from the class of the user's optimizer, with its name, so that saved
models load without this package.  It averages the gradients in ``apply``, which Keras always calls.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hvd_compress.base import Compressor
from hvd_compress.chain import chain
from hvd_compress.errors import ConfigError, NeedsTuning, UnsupportedError
from hvd_compress.integrations.options import HorovodOptions
from hvd_compress.meetings import allreduce
from hvd_compress.methods.optimizers import (
    another_kind,
    check_one_momentum,
    moved,
    too_coarse,
    velocity_of_one,
)
from hvd_compress.transforms import momentum_after_averaging

from .binding import VariableBinding
from .runtime import Runtime, numbers_of, sample_of
from .saved_state import state_on_disk
from .slots import native, places_of_groups, slots_of

logger = logging.getLogger("hvd_compress")
_COPY = (
    "make the plain optimizer from it, type(optimizer).__bases__[-1].from_config("
    "optimizer.get_config()), and pass that to hvd.DistributedOptimizer"
)
#: by which a ``LossScaleOptimizer`` marks what it wraps
_MARKS = {"loss_scale_factor": None, "_is_wrapped_by_loss_scale_optimizer": True}


def inner_of(optimizer: Any) -> Any:
    """Return the optimizer that steps, inside of loss scaling."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def variables_of(optimizer: Any, gradients: Any, given: Any, is_built: bool | None = None) -> Any:
    """Return the variables of a call of ``apply``, for which an optimizer of Keras 3 is built if it
    is not.  ``is_built`` is for optimizers that say so by something else than ``built``."""
    import keras

    is_built = optimizer.built if is_built is None else is_built
    if given is None and not is_built:
        keras.optimizers.Optimizer.apply(optimizer, gradients)  # raises
    variables = list(optimizer._trainable_variables if given is None else given)
    if not is_built:
        with keras.name_scope(optimizer.name):
            optimizer.build(variables)
    return variables


class Distribution:
    """How one optimizer of Keras averages gradients: what it was told, and which variables it has.

    It is an attribute of the optimizer, and neither Keras nor TensorFlow looks for variables in it.
    It does not hold the optimizer, which would outlive its last use.

    Attributes:
        average_passes: gradients of several backward passes are averaged instead of added up.
        scale_local: gradients of local variables are divided by the number of ranks.
        takes_momentum: the momentum of the optimizer acts inside the exchange.
        local: the ids of variables whose gradients stay on this rank.
        epoch: the one that was announced before there was a binding, or ``None``.
        is_built: the variables are known.
        places, local_places: the slots of variables in ``compression`` and ``local_compression`` of
            the optimizer, by id.
        sums, count: the gradients of the backward passes so far, by id, and the number of these.
    """

    sums: dict[int, tf.Variable]
    count: tf.Variable

    def __init__(
        self,
        runtime: Runtime,
        method: Compressor,
        options: HorovodOptions,
        inner: Any,
        *,
        average_passes: bool,
        scale_local: bool,
    ) -> None:
        self.runtime, self.method, self.options = runtime, method, options
        self.average_passes, self.scale_local = average_passes, scale_local
        is_sgd = any(cls.__name__ == "SGD" for cls in type(inner).__mro__)
        self.takes_momentum = method.takes_momentum and is_sgd
        self.local: set[int] = set()
        self.epoch: int | None = None
        self.is_built = False
        self.places: dict[int, int] = {}
        self.local_places: dict[int, int] = {}
        if self.takes_momentum:
            check_one_momentum(method, inner.momentum)
        if runtime.hvd.rank() > 0:
            return
        is_open, wrapped = method.takes_momentum and method.momentum is None, type(inner).__name__
        if warning := too_coarse(method, inner):
            warnings.warn(warning, NeedsTuning, stacklevel=4)
        if is_open and not is_sgd:
            warnings.warn(another_kind(method, wrapped), UserWarning, stacklevel=4)
        elif is_open and inner.momentum:
            logger.info("%s", moved(method, [inner.momentum], inner.nesterov, wrapped))

    def bind(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Make the bindings of an optimizer, whose variables are known now."""
        shared = [v for v in variables if id(native(v)) not in self.local]
        local = [v for v in variables if id(native(v)) in self.local]
        self.places, self.local_places = (
            {id(native(v)): i for i, v in enumerate(some)} for some in (shared, local)
        )
        inner, takes, options = inner_of(optimizer), self.takes_momentum, self.options
        optimizer.compression = binding = VariableBinding(
            self.runtime,
            self.method,
            slots_of(shared),
            dataclasses.replace(options, groups=places_of_groups(options.groups, shared)),
            momentum=float(inner.momentum) if takes else 0.0,
            nesterov=inner.nesterov if takes else False,
        )
        if self.method.partner is not None:
            inner.follow(binding, self.places)
        if takes and local:  # their momentum is off with that of all others
            after = momentum_after_averaging(*binding.store.momentum_used())
            method = chain(after, via=allreduce())
            own = HorovodOptions.checked(self.runtime.hvd, method, sparse_as_dense=True)
            optimizer.local_compression = VariableBinding(
                self.runtime, method, slots_of(local), own, alone=True
            )
        with tf.init_scope():
            if self.epoch is not None:
                binding.set_epoch(self.epoch)
            if options.backward_passes_per_step > 1:
                self.sums = {
                    id(native(v)): tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
                    for v in variables
                }
                self.count = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.is_built = True

    def step(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        step: Callable[[list[Any]], Any],
    ) -> None:
        """Average and ``step``, after as many backward passes as the user asked for."""
        for variable in variables:
            if id(native(variable)) not in self.places | self.local_places:
                raise ConfigError(
                    f"{variable.name} came after this optimizer was built: build the model first, "
                    "or make a new optimizer"
                )
        passes = self.options.backward_passes_per_step
        if passes == 1:
            self._exchange(optimizer, gradients, variables, step)
            return
        sums = [self.sums[id(native(variable))] for variable in variables]
        for total, gradient in zip(sums, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                if not self.options.sparse_as_dense:
                    raise ConfigError(
                        "gradients of some rows cannot be added up over backward passes: pass "
                        "sparse_as_dense=True, or backward_passes_per_step=1"
                    )
                gradient = tf.convert_to_tensor(gradient)
            if gradient is not None:
                total.assign_add(gradient)
        self.count.assign_add(1)

        def all_passes() -> tf.Tensor:
            divisor = passes if self.average_passes else 1
            whole = [
                None if gradient is None else total.value() / divisor
                for total, gradient in zip(sums, gradients, strict=True)
            ]
            self._exchange(optimizer, whole, variables, step)
            for total in sums:
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        tf.cond(tf.equal(self.count % passes, 0), all_passes, lambda: tf.constant(False))

    def velocities(self, optimizer: Any) -> Iterator[tuple[Any, str, float]]:
        """Yield momentum slots that are off, the places of the states whose velocities act instead,
        and the slot for a velocity of 1.  Keras's slots contain the learning rate, and our
        velocities, if Nesterov, the momentum."""
        inner, binding = inner_of(optimizer), optimizer.compression
        if not self.takes_momentum or not getattr(inner, "momentums", None):
            return
        momentum, nesterov = binding.store.momentum_used()
        if not momentum:
            return
        factor = -float(np.asarray(inner.learning_rate)) / velocity_of_one(momentum, nesterov)
        if self.options.op == self.runtime.hvd.Sum:  # velocities are of averages
            factor *= binding.engine.size
        for variable, slot in zip(optimizer._trainable_variables, inner.momentums, strict=True):
            place = self.places.get(id(native(variable)))
            if place is not None and "velocity" in binding.store.states[str(place)]:
                yield slot, str(place), factor

    def _exchange(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        step: Callable[[list[Any]], Any],
    ) -> None:
        """Step by averages, but for local variables, and without momentum that acted inside the
        exchange already."""
        inner, binding = inner_of(optimizer), optimizer.compression
        dense = [
            g if g is None or isinstance(g, tf.IndexedSlices) else tf.convert_to_tensor(g)
            for g in gradients
        ]
        keys = [id(native(variable)) for variable in variables]
        places = [self.places.get(key) for key in keys]
        common = [numbers_of(binding.step, inner)]
        if not hasattr(inner, "synchronize_parameters"):  # else weights differ for some steps
            shared = [v for v, place in zip(variables, places, strict=True) if place is not None]
            common.append(sample_of(binding.step, shared))
        is_scaled = hasattr(optimizer, "dynamic_scale")
        scale = native(optimizer.dynamic_scale).value() if is_scaled else None
        results = binding.reduce(
            dense, places, scale_local=self.scale_local, scale=scale, common=common
        )
        if hasattr(optimizer, "local_compression"):
            places = [self.local_places.get(key) for key in keys]
            results = optimizer.local_compression.reduce(results, places, scale=scale)
        if not self.takes_momentum:
            step(results)
            return
        momentum = inner.momentum, inner.nesterov
        inner.momentum, inner.nesterov = 0.0, False
        try:
            step(results)
        finally:
            inner.momentum, inner.nesterov = momentum


class NotInLossScaling:
    """Mixed into the class of an optimizer: once it is set up, wrapping it is an error.

    A ``LossScaleOptimizer`` looks for NaN and Inf before gradients are averaged: some ranks would
    step, and others wait for them.  It marks the optimizer that it wraps: in Keras 3 by
    switching its loss scaling off, in tf_keras by an attribute.
    """

    #: what to write instead
    instead_of_scaling: ClassVar[str]
    may_be_wrapped = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not self.may_be_wrapped and name in _MARKS and value is _MARKS[name]:
            raise UnsupportedError(self.instead_of_scaling)
        super().__setattr__(name, value)


class KerasCompressedOptimizer(NotInLossScaling):
    """``isinstance(optimizer, KerasCompressedOptimizer)``: made by :func:`distribute`.

    Attributes:
        compression: a :class:`hvd_compress.tensorflow.binding.VariableBinding`, once it is built.
        distribution: how gradients are averaged.
    """

    distribution: Distribution
    instead_of_scaling = (
        "a distributed optimizer inside of a LossScaleOptimizer would step on some ranks only: "
        "write hvd.DistributedOptimizer(LossScaleOptimizer(optimizer)) before model.compile, or "
        "set the policy mixed_float16 before hvd.DistributedOptimizer"
    )

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
        self.distribution.epoch = epoch
        if self.distribution.is_built:
            self.compression.set_epoch(epoch)

    def register_local_var(self, variable: Any) -> None:
        """Keep the gradient of this variable on this rank; call this before the optimizer is
        built."""
        if self.distribution.is_built:
            raise ConfigError("register_local_var() must be called before the first step")
        self.distribution.local.add(id(native(variable)))


class Keras3Optimizer(KerasCompressedOptimizer):
    """Mixed into the class of an optimizer of Keras 3."""

    def build(self, variables: Sequence[Any]) -> None:
        if self.distribution.is_built:
            return
        super().build(variables)  # type: ignore[misc]
        self.distribution.bind(self, variables)
        self.compression_on_disk = state_on_disk(self.compression)
        if hasattr(self, "local_compression"):
            self.local_compression_on_disk = state_on_disk(self.local_compression)

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        variables = variables_of(self, grads, trainable_variables, self.distribution.is_built)
        step = super().apply  # type: ignore[misc]
        self.distribution.step(
            self, list(grads), variables, lambda averages: step(averages, variables)
        )

    def save_own_variables(self, store: Any) -> None:
        """Save the variables with momentum as plain Keras would have it, so that it can go on."""
        own: dict[str, Any] = {}
        super().save_own_variables(own)  # type: ignore[misc]
        places = {id(variable): str(i) for i, variable in enumerate(self.variables)}
        for slot, place, factor in self.distribution.velocities(self):
            velocity = self.compression.store.states[place]["velocity"]
            own[places[id(slot)]] = (velocity.numpy() * factor).reshape(slot.shape)
        for name, array in own.items():
            store[name] = array

    def take_over(self, optimizer: Any) -> None:
        """Take over the state of the optimizer that this one is made from."""
        old, new = inner_of(optimizer), inner_of(self)
        self.build(old._trainable_variables)
        pairs = list(zip(new.variables, old.variables, strict=True))
        if old is not optimizer and optimizer.built:  # the scale
            pairs += zip(self._variables, optimizer._variables, strict=True)
        for own, theirs in pairs:
            own.assign(theirs)
        velocities = {
            f"{place}.velocity": native(slot).value() / factor
            for slot, place, factor in self.distribution.velocities(self)
            if factor  # at the start of a warm-up the rate may be zero, and so is the slot
        }
        self.compression.restore(self.compression.header(consolidated=True), velocities)


class TfKerasOptimizer(KerasCompressedOptimizer):
    """Mixed into the class of an optimizer of tf_keras."""

    def build(self, var_list: Sequence[Any]) -> None:
        super().build(var_list)  # type: ignore[misc]
        if not self.distribution.is_built:
            self.distribution.bind(self, var_list)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        with tf.init_scope():
            self.build(variables)
        step = super().apply_gradients  # type: ignore[misc]
        self.distribution.step(
            self,
            gradients,
            variables,
            lambda averages: step(zip(averages, variables, strict=True), *args, **kwargs),
        )
        return self.iterations

    def take_over(self, optimizer: Any) -> None:
        """Refuse the state of an optimizer of tf_keras, which is not taken over."""
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
    old, inner = inner_of(optimizer), inner_of(new)
    for excluded in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(old, excluded):  # not in the configuration
            setattr(inner, excluded, getattr(old, excluded))
    return new
