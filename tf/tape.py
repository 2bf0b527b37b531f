"""``DistributedGradientTape`` and ``allreduce`` for this package's compressors."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.integrations import horovod as drop_in
from hvd_compress.integrations.horovod import hand_on, in_place_of, refuse_nodes, with_options
from hvd_compress.integrations.options import HorovodOptions
from hvd_compress.methods import BF16, FP16, NoCompression
from hvd_compress.methods.optimizers import check_partner
from hvd_compress.methods.rows import keeps_residual
from hvd_compress.methods.texts import as_fixed

from .binding import VariableBinding
from .runtime import Runtime, check_context, sample_of
from .slots import TensorSlot, native, places_of_groups, slots_of, weights_of

_BINDINGS = "_hvd_compress_bindings"
#: the options of ``bind`` by name: Horovod's but for the passes, which are an optimizer's
_OPTIONS = {f.name for f in dataclasses.fields(HorovodOptions)} - {"backward_passes_per_step"}


def is_ours(runtime: Runtime, compression: Any) -> bool:
    """Return whether this package takes a value for ``compression=``, or Horovod may.  Raise
    ``ConfigError`` if neither does."""
    if (
        isinstance(compression, VariableBinding)
        or drop_in.is_ours(compression)
        or not runtime.has_plain
    ):
        return True
    if compression is not None and not hasattr(compression, "compress"):
        as_fixed(compression)
    return False


def binder(runtime: Runtime, module: str) -> Callable[..., VariableBinding]:
    """Return ``bind`` over a runtime; it belongs to ``module``."""

    @tf.autograph.experimental.do_not_convert
    def bind(
        compression: Any,
        variables: Sequence[Any],
        *,
        momentum: float | None = None,
        nesterov: bool = False,
        **options: Any,
    ) -> VariableBinding:
        """Return the state of a method for some variables; a later call finds it again::

            binding = hvd.bind(hvd.DGC(momentum=0.9), model.trainable_variables)
            tape = hvd.DistributedGradientTape(tape, compression=binding)

        A tape lives for one step, so state that is kept from step to step belongs to the variables.
        ``tf.train.Checkpoint(model=model, compression=binding)`` saves it.

        Args:
            compression: a method, its class, its name, or a text such as "dgc:density=0.01".
            variables: of TensorFlow or Keras, floats of any shape, in the order of the gradients.
            momentum, nesterov: for methods that take momentum over, which the optimizer must not
                apply again; ``None`` for none.
            options: Horovod's, such as ``op`` and ``seed``.

        Raises:
            ConfigError: there are no variables, or an option has a value that cannot be honoured.
        """
        slots = slots_of(variables)
        if isinstance(compression, VariableBinding):
            known, asked = ([slot.name for slot in of] for of in (compression.store.slots, slots))
            if known != asked:
                raise ConfigError(
                    f"this compression is bound to {len(known)} variables, {', '.join(known[:3])} "
                    f"..., and not to the {len(asked)} that are used here, {', '.join(asked[:3])} "
                    "..."
                )
            return compression
        if unknown := sorted(options.keys() - _OPTIONS):
            names = ", ".join(sorted(_OPTIONS))
            raise ConfigError(
                f"bind has no option {unknown[0]!r}; it has momentum, nesterov, {names}"
            )
        if not variables:
            raise ConfigError("there are no variables whose gradients could be exchanged")
        variables = [native(variable) for variable in variables]
        method = as_fixed(compression)
        check_partner(method, None, None)
        options["groups"] = places_of_groups(options.get("groups"), variables)
        shared = HorovodOptions.checked(runtime.hvd, method, **options)
        taken: dict[str, Any] = {
            "momentum": 0.0 if momentum is None else momentum,
            "nesterov": nesterov,
        }
        key = (runtime, method, repr((shared, taken)))
        # Held by a variable: it lives as long as the state makes sense.
        table = variables[0].__dict__.setdefault(_BINDINGS, [])
        for known_key, references, binding in table:
            # Variables would compare by value.
            if known_key == key and [id(r()) for r in references] == list(map(id, variables)):
                return binding
        table[:] = [entry for entry in table if all(r() is not None for r in entry[1])]
        binding = VariableBinding(runtime, method, slots, shared, **taken)
        table.append((key, [weakref.ref(v) for v in variables], binding))
        is_open = method.takes_momentum and method.momentum is None
        if is_open and momentum is None and runtime.hvd.rank() == 0:
            name = type(method).__name__
            warnings.warn(
                f"{method.name} corrects momentum, and a tape knows nothing of the optimizer: it "
                f"gets error feedback alone. For momentum correction write {name}(momentum=0.9) "
                "and give the optimizer momentum=0, or use hvd.DistributedOptimizer; if error "
                f"feedback alone is what you want, write {name}(momentum=0.0)",
                UserWarning,
                stacklevel=5,
            )
        return binding

    bind.__module__, bind.__qualname__ = module, "bind"
    return bind


class CompressedTape:
    """Mixed into the class of a tape; its attributes are set by :func:`_distributed`."""

    _bind: Callable[[Sequence[Any]], VariableBinding]
    _scale_local: bool
    _local: set[int]

    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of this variable on this rank."""
        self._local.add(id(native(source)))

    @tf.autograph.experimental.do_not_convert
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Return what ``tf.GradientTape.gradient`` does, averaged over the ranks.

        ``use_generic_names`` is there for Horovod's callers; names follow the variables.
        """
        del use_generic_names
        gradients = super().gradient(  # type: ignore[misc]
            target, tf.nest.map_structure(native, sources), output_gradients, unconnected_gradients
        )
        flat = tf.nest.flatten(sources)
        variables = [source for source in flat if id(native(source)) not in self._local]
        self.compression = binding = self._bind(variables)
        numbers = itertools.count()
        found = binding.reduce(
            tf.nest.flatten(gradients),
            [None if id(native(source)) in self._local else next(numbers) for source in flat],
            scale_local=self._scale_local,
            common=[sample_of(binding.step, variables)],
        )
        return tf.nest.pack_sequence_as(sources, found)


def wrap_tape(
    runtime: Runtime, bind: Callable[..., VariableBinding], factory: Callable[..., Any], **more: Any
) -> Any:
    """Return a factory with the signature of Horovod's ``DistributedGradientTape``, and options
    ``more`` with their defaults, whose tapes take this package's compressors."""
    signature = with_options(factory, seed=0, **more)

    @in_place_of(factory)
    @tf.autograph.experimental.do_not_convert
    def DistributedGradientTape(*args: Any, **kwargs: Any) -> Any:  # noqa: N802
        """Return a tape whose ``gradient`` averages over the ranks::

            tape = hvd.DistributedGradientTape(tape, compression=hvd.DGC(momentum=0.9))

        Args:
            compression: a method, its class, its name, a text, or what ``hvd.bind`` returned.  With
                Horovod's own, and with none unless ``HVD_COMPRESSION`` names one, the tape is
                Horovod's, if there is Horovod.
            seed: for randomness that the ranks share.
            local_layers: layers of Keras whose gradients stay on their rank, for
                ``PartialDistributedGradientTape``.
        """
        refuse_nodes(kwargs)
        options = runtime.arguments(signature, args, kwargs)
        if not is_ours(runtime, options["compression"]):
            return _with_keras_variables(hand_on(factory, options))
        return _distributed(bind, **options)

    DistributedGradientTape.__signature__ = signature
    return DistributedGradientTape


def _distributed(
    bind: Callable[..., VariableBinding],
    gradtape: Any,
    *,
    compression: Any,
    groups: Any = None,
    num_groups: int = 0,
    scale_local_gradients: bool = True,
    local_layers: Any = None,
    **options: Any,
) -> Any:
    """Return a tape like ``gradtape`` that averages gradients over the ranks."""
    if not isinstance(gradtape, tf.GradientTape):
        raise ConfigError(f"gradtape must be a tf.GradientTape; got {type(gradtape).__name__}")
    cls = type(type(gradtape).__name__, (CompressedTape, type(gradtape)), {})
    new = cls(
        persistent=gradtape._persistent,
        watch_accessed_variables=gradtape._watch_accessed_variables,
    )
    own = (
        {}
        if isinstance(compression, VariableBinding)
        else {**options, "groups": groups or num_groups}
    )
    new._tape = gradtape._tape
    new._bind = functools.partial(bind, compression, **own)
    new._scale_local = scale_local_gradients
    new._local = {id(native(variable)) for variable in weights_of(local_layers)}
    return new


def _with_keras_variables(tape: Any) -> Any:
    """Return Horovod's own tape such that it takes the variables of Keras 3."""
    horovods, register = type(tape).gradient, type(tape).register_local_source

    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return horovods(self, target, tf.nest.map_structure(native, sources), *args, **kwargs)

    def register_local_source(self: Any, source: Any) -> None:
        register(self, native(source))

    type(tape).gradient = gradient
    type(tape).register_local_source = register_local_source
    return tape


# -- single tensors ---------------------------------------------------------------------------

#: by what was asked for; those without a state apart, of which not all are kept
_by_name: dict[Any, VariableBinding] = {}
_stateless: dict[Any, VariableBinding] = {}


def _binding_for(
    runtime: Runtime, compression: Any, tensors: Sequence[Any], name: str | None, **options: Any
) -> VariableBinding:
    """Return the binding of a method for these tensors, which are exchanged together."""
    check_context()
    method = as_fixed(compression)
    if not isinstance(name, str | None):
        raise ConfigError(f"name must be a text; got {name!r}")
    if not all(t.shape.is_fully_defined() for t in tensors):
        raise ConfigError(
            f"compression needs shapes that are known; got {[t.shape for t in tensors]}"
        )
    zeros = [tf.zeros(t.shape, t.dtype) for t in tensors]
    remembers = any(method.init(x) or method.common(x) for x in zeros)
    are_rows = any(isinstance(t, tf.IndexedSlices) for t in tensors)
    remembers |= are_rows and keeps_residual(method)
    if name is None and remembers:
        raise ConfigError(
            f"{method.name} remembers what it did not send, from one call to the next: name the "
            "tensor, hvd.allreduce(tensor, name='...', compression=...), with another name for each"
        )
    name = "allreduce" if name is None else name
    names = [name] if len(tensors) == 1 else [f"{name}.{i}" for i in range(len(tensors))]
    slots = [
        TensorSlot(n, tf.TensorShape(t.shape), t.dtype) for n, t in zip(names, tensors, strict=True)
    ]
    # Graphs are of one number of ranks.
    size = (options["process_set"] or runtime.hvd.global_process_set).size()
    key = (runtime, method, str(slots), repr(sorted(options.items())), size)
    table = _by_name if remembers else _stateless
    if key not in table:
        groups = [list(range(len(slots)))] if len(slots) > 1 else None
        with tf.init_scope():
            shared = HorovodOptions.checked(runtime.hvd, method, groups=groups, **options)
            binding = VariableBinding(runtime, method, slots, shared)
        # Nothing is in flight between calls: nobody knows whether there will be another.
        VariableBinding.alive.discard(binding)
        # Their graphs are worth keeping, within limits.
        if not remembers and len(_stateless) >= 100:
            _stateless.pop(next(iter(_stateless)))
        table[key] = binding
    return table[key]


def wrap_allreduce(
    runtime: Runtime, function: Callable[..., Any], several: bool
) -> Callable[..., Any]:
    """Return Horovod's ``allreduce`` or ``grouped_allreduce``, extended to take this package's
    compressors.  The state of a method is kept by ``name``, shape and dtype of the tensor."""
    signature = inspect.signature(function)

    @in_place_of(function)
    @tf.autograph.experimental.do_not_convert
    def allreduce(*args: Any, **kwargs: Any) -> Any:
        """Return the average or the sum over the ranks.  Methods that only cast pass gradients on;
        others do not.

        Args:
            compression: any method, too.  One that remembers what it did not send keeps that by
                ``name``, shape and dtype.

        Raises:
            ConfigError: an option has a value that cannot be honoured; or the method remembers, and
                there is no name.
        """
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        options, none = call.arguments, signature.parameters["compression"].default
        option = "tensors" if several else "tensor"
        compression = none if options["compression"] is None else options["compression"]
        if compression is none or not is_ours(runtime, compression):
            return function(*args, **kwargs)
        given = options[option] if several else [options[option]]
        tensors = [t if isinstance(t, tf.IndexedSlices) else tf.convert_to_tensor(t) for t in given]
        for scale in ("prescale_factor", "postscale_factor"):
            if options[scale] != 1.0:
                raise ConfigError(
                    f"{scale}={options[scale]} cannot be combined with {compression!r}: scale the "
                    "tensor before the call, or the result after it"
                )
        op = runtime.hvd.handle_average_backwards_compatibility(options["op"], options["average"])
        of_all = {"op": op, "process_set": options["process_set"]}
        binding = _binding_for(runtime, compression, tensors, options["name"], **of_all)
        results = binding.reduce(tensors)
        if not any(isinstance(t, tf.IndexedSlices) for t in tensors):

            def again(gradients: list[Any]) -> list[Any]:
                options[option] = gradients if several else gradients[0]
                found = allreduce(*call.args, **call.kwargs)
                return found if several else [found]

            results = _linked(tensors, results, binding.method, again)
        return results if several else results[0]

    return allreduce


def _linked(
    tensors: list[Any],
    results: Sequence[Any],
    method: Any,
    again: Callable[[list[Any]], list[Any]],
) -> list[Any]:
    """Return results whose gradients are what ``again`` makes of theirs, if the method is
    linear."""

    @tf.custom_gradient
    def link(*both: Any) -> Any:
        def gradient(*gradients: Any) -> list[Any]:
            if not isinstance(method, NoCompression | FP16 | BF16):
                raise UnsupportedError(
                    f"{method.name} passes no gradient: hvd.allreduce(tf.stop_gradient(tensor), "
                    "...), or leave compression out"
                )
            found = again([tf.convert_to_tensor(g) for g in gradients])
            return [*found, *(None for _ in results)]

        return [tf.identity(y) for y in both[len(tensors) :]], gradient

    return list(link(*tensors, *results))
