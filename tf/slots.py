"""Variables and their gradients: names, shapes, dtypes and groups, and rows that are merged."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvd_compress.config import is_whole
from hvd_compress.errors import ConfigError
from hvd_compress.sharding import shards_of


class TensorSlot(NamedTuple):
    """The name, shape and dtype of a variable."""

    name: str
    shape: tf.TensorShape
    dtype: tf.DType


def slots_of(variables: Sequence[Any]) -> list[TensorSlot]:
    """Return the slots of TensorFlow's or Keras's variables; names are made unique."""
    if not isinstance(variables, Sequence) or isinstance(variables, str | bytes):
        raise ConfigError(
            f"variables must be a list of variables, such as model.trainable_variables; got "
            f"{type(variables).__name__}"
        )
    slots: list[TensorSlot] = []
    taken: set[str] = set()
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise ConfigError(f"gradients belong to variables; got {type(variable).__name__}")
        base = name = str(getattr(variable, "path", variable.name)).removesuffix(":0")
        numbers = itertools.count(1)
        while name in taken:
            name = f"{base}_{next(numbers)}"
        taken.add(name)
        slots.append(TensorSlot(name, tf.TensorShape(variable.shape), tf.as_dtype(variable.dtype)))
    return slots


def native(variable: Any) -> Any:
    """Return the ``tf.Variable`` inside of a variable of Keras 3, which Horovod does not know."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def variables_of_both(model: Any, optimizer: Any) -> list[tf.Variable]:
    """Return the variables of a model and of its optimizer, of Keras 3 or tf_keras."""
    known = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    return [native(variable) for variable in (*model.variables, *known)]


def weights_of(layers: Any) -> list[Any]:
    """Return the trainable weights of a layer, or of several."""
    layers = [] if layers is None else layers if isinstance(layers, list | tuple) else [layers]
    for layer in layers:
        if not hasattr(layer, "trainable_weights"):
            raise ConfigError(f"local_layers must be layers of Keras; got {type(layer).__name__}")
    return [variable for layer in layers for variable in layer.trainable_weights]


def places_of_groups(groups: Any, variables: Sequence[Any]) -> Any:
    """Return Horovod's ``groups``, lists of variables or a number of lists, with indices for
    variables."""
    if groups is None or groups == 0:
        return None
    if is_whole(groups) and groups > 0:
        return groups
    lists = groups if isinstance(groups, list | tuple) else [None]
    if not all(isinstance(group, list | tuple) for group in lists):
        raise ConfigError(f"groups must be lists of variables, or their number; got {groups!r}")
    places = {id(native(variable)): i for i, variable in enumerate(variables)}
    return [[places[id(native(v))] for v in group if id(native(v)) in places] for group in groups]


def names_of_groups(
    groups: Any, slots: Sequence[TensorSlot], places: list[int]
) -> list[list[str]] | None:
    """Return the names of variables that are exchanged together, of those at ``places``, which
    have gradients; ``groups`` as :func:`places_of_groups` returned it."""
    if groups is None:
        return None
    if isinstance(groups, int):
        count = min(groups, len(places))
        groups = [places[part] for part in shards_of(len(places), count)] if count else []
    return [[slots[i].name for i in group if i in places] for group in groups]


def on_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """Return what ``function`` makes of a tensor, or of the values of rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)


def merged(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return the gradient of an embedding with every row once, in ascending order; indices as
    int64."""
    indices, values = add_up(gradient.indices, gradient.values)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def add_up(indices: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    own, places = tf.unique(tf.cast(indices, tf.int64))
    order = tf.argsort(own)
    total = tf.math.unsorted_segment_sum(values, places, tf.size(own))
    return tf.gather(own, order), tf.gather(total, order)
