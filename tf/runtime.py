"""The surroundings of a binding to TensorFlow.

These are the runtime that carries exchanges, Horovod or MPI alone; values that ranks must have in
common; and checks of where it is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvd_compress.agreement import SAMPLED_EVERY, WEIGHTS, Terms
from hvd_compress.backends.weak import weakly
from hvd_compress.base import Array
from hvd_compress.engines.base import Engine
from hvd_compress.engines.named import ProcessSetEngine
from hvd_compress.errors import ConfigError, UnsupportedError

from .slots import native

#: variables, and elements of each, that are looked at
_VARIABLES, _ELEMENTS = 4, 4
#: options of Keras's optimizers that are no numbers of a step, or are looked at in every step
_LEFT_OUT = {"name", "learning_rate", "jit_compile", "is_legacy_optimizer"}


class Number(NamedTuple):
    """A number that is known only when a graph runs, as int64 or float64: a scalar, or a vector
    with a label for each element."""

    value: tf.Tensor
    labels: tuple[str, ...] = ()


class Common(NamedTuple):
    """The terms that ranks must have in common: by name what is known while a graph is traced, and
    what is known when it runs."""

    terms: Terms
    numbers: Mapping[str, Number]

    def known(self, values: Iterable[np.ndarray]) -> Terms:
        """Return all of it as terms, given the values of the numbers; those with labels are
        entries of a list."""
        found = dict(self.terms)
        for (name, number), value in zip(self.numbers.items(), values, strict=True):
            if not number.labels:
                found[name] = str(value)
                continue
            pairs = zip(number.labels, value.tolist(), strict=True)
            found[name] = [*found.get(name, []), *(f"{label} = {x:.9g}" for label, x in pairs)]
        return found


class Runtime(Protocol):
    """Ranks and how they exchange.

    Attributes:
        has_plain: there are tapes and optimizers of Horovod, for calls without a method of ours.
    """

    has_plain: bool

    @property
    def hvd(self) -> Any:
        """The module ``horovod.tensorflow``, or another with its functions."""

    def arguments(
        self, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return all arguments of a call; if it names no compression, the environment may."""

    def engine(
        self,
        process_set: Any,
        predivide: float,
        prefix: Callable[[], str],
        agreed: tf.Tensor | None,
    ) -> Engine:
        """Return an engine whose exchanges are traced.

        Args:
            process_set: two ranks or more, and this one among them.
            predivide: arrays are divided by it before they are added, and sums multiplied by it.
            prefix: returns how the names of collectives begin, the same on all ranks; it is asked
                for each.
            agreed: a scalar that is true as soon as collectives may start; ``None``: at once.
        """

    def eager_engine(self, process_set: Any, prefix: str, arrays: type) -> Engine:
        """Return an engine for use outside of graphs.

        Args:
            process_set: ``None`` for all ranks.
            prefix: of the names of its collectives, the same on all ranks.
            arrays: ``np.ndarray`` or ``tf.Tensor``.
        """

    def agreement(self, common: Common, prefix: str, process_set: Any) -> tf.Tensor:
        """Return a tensor that is there only after all ranks are known to agree; see
        :mod:`hvd_compress.agreement`.  ``prefix`` is that of :meth:`engine`.

        If the ranks differ when the graph runs, it fails on every rank with a ``MismatchError``.
        TensorFlow shows it inside of an error of its own.
        """


class GraphEngine(ProcessSetEngine):
    """An engine whose collectives become nodes of a graph: replies are symbols, and nothing waits
    while the graph is traced."""

    def __init__(self, process_set: Any, predivide: float, agreed: tf.Tensor | None) -> None:
        super().__init__(process_set, predivide)
        self._agreed = agreed

    def agree(self, terms: Terms, like: Array, at_once: bool = False) -> None:
        """Compare the ranks at once; in a graph do nothing, since it has compared everything."""
        if self._agreed is None and not tf.inside_function():
            super().agree(terms, like)
            # Each collective waits here, and ranks that differ may never make the next one.
            self._bring_in_agreement(at_once=True)

    def check_step(self, describe: Callable[[], list[str]], planned: bool, like: Array) -> None:
        """Do nothing, since a graph cannot wait while it is traced."""

    def _wait(self, handle: Any) -> Any:
        return handle

    def _split(self, own: Any, everything: Any) -> list[Any]:
        each = own.shape[0]
        check = tf.debugging.assert_equal(
            tf.size(everything),
            each * self.size,
            message="PayloadError: the ranks' payloads differ in size: do all run the same "
            "version with the same compression options?",
        )
        with tf.control_dependencies([] if check is None else [check]):
            rows = tf.reshape(everything, [self.size, each])
        return tf.unstack(rows)

    def _splits(self, sizes: Sequence[int]) -> Any:
        return tf.stack([tf.cast(size, tf.int32) for size in sizes])


def sample_of(step: tf.Variable, variables: Sequence[Any]) -> Common:
    """Return some elements of some variables, and zeros but for one step in ``SAMPLED_EVERY``.

    The first step is left out: users broadcast the weights after it, when all variables exist.
    """
    some = variables[:: -(-len(variables) // _VARIABLES)] if variables else []
    places = [
        (native(variable), slice(None, None, -(-size // _ELEMENTS)))
        for variable in some
        if (size := variable.shape.num_elements() if variable.shape is not None else 0)
    ]
    labels = tuple(
        f"{v.name}[{place}]"
        for v, chosen in places
        for place in range(v.shape.num_elements())[chosen]
    )
    now = step.value()

    def sample() -> tf.Tensor:
        own = [tf.reshape(v.value(), [-1])[chosen] for v, chosen in places]
        return tf.concat([tf.cast(x, tf.float64) for x in own], 0)

    is_due = (now > 0) & (now % SAMPLED_EVERY == 0)
    none = tf.zeros([len(labels)], tf.float64)
    return Common({}, {WEIGHTS: Number(tf.cond(is_due, sample, lambda: none), labels)})


def numbers_of(step: tf.Variable, optimizer: Any) -> Common:
    """Return the numbers of an optimizer of Keras: what a graph holds, and the learning rate.

    The rate is left out in the first step, after which users broadcast the variables.
    """
    with tf.init_scope():
        config = optimizer.get_config()
    texts = [f"{name}={text}" for name, x in sorted(config.items()) if (text := _text(name, x))]
    terms: Terms = {"optimizer": [type(optimizer).__name__, *texts]}
    rate = tf.cast(tf.convert_to_tensor(optimizer.learning_rate), tf.float64)
    rate = tf.where(tf.equal(step, 0), tf.zeros_like(rate), rate)
    return Common(terms, {"optimizer": Number(tf.reshape(rate, [1]), ("learning_rate",))})


def _text(name: str, x: Any) -> str:
    parts = x if isinstance(x, list | tuple) else [x]
    if name in _LEFT_OUT or not all(isinstance(p, bool | int | float | None) for p in parts):
        return ""
    return ", ".join(f"{p:.9g}" if isinstance(p, float) else str(p) for p in parts)


def check_context() -> None:
    """Raise unless the graph that is traced now, if any, may exchange gradients.  A function that
    XLA compiles can run neither Horovod's collectives nor Python, and graphs of TensorFlow 1 run
    later."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UnsupportedError(
            "gradients cannot be exchanged inside a function that XLA compiles: leave "
            "jit_compile=True out of tf.function, or write model.compile(..., jit_compile=False)"
        )
    with tf.init_scope():  # out of functions, and of nothing else
        is_graph = not tf.executing_eagerly()
    if is_graph:
        raise UnsupportedError(
            "this package's methods keep their state in eager variables, which a graph of "
            "TensorFlow 1 (tf.Graph, placeholders, tf.compat.v1.Session) cannot write: leave out "
            "tf.compat.v1.disable_eager_execution(), or call "
            "tf.compat.v1.enable_eager_execution() first, and put the step into a tf.function; "
            "or pass Horovod's own compression=hvd.Compression.fp16"
        )


def in_python(
    owner: Any, function: Callable[..., Any], inputs: Sequence[Any], dtypes: Sequence[tf.DType]
) -> Any:
    """Return what ``function(owner, *inputs)`` makes of eager tensors: now, or when the graph runs,
    which does not keep the owner."""
    if tf.executing_eagerly():
        return function(owner, *map(tf.convert_to_tensor, inputs))
    return tf.py_function(weakly(owner, function), inputs, dtypes)


def check_device(option: str, device: Any) -> None:
    """Raise ``ConfigError`` unless ``tf.device`` takes a value."""
    try:
        tf.DeviceSpec.from_string(device)
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f'{option} must be a name of a device such as "GPU:0"; got {device!r}'
        ) from None
