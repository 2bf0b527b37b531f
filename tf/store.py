"""The variables as a traced step knows them: states go in and come out as symbols."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvd_compress.base import Compressor, Context, Exchange, Outcome, State
from hvd_compress.methods.rows import as_rows, keeps_residual
from hvd_compress.reduce import Reducer, Store
from hvd_compress.transforms import momentum_after_averaging

from . import backend
from .rows import exchange_rows, merged

#: what is counted in the graph: these fields of a ``Record``
COUNTED = ("steps", "bytes_sent", "bytes_received", "dense_bytes", "elements", "elements_sent")

#: (direction, state) by index of the variable, and for all variables what is counted: a row for
#: each (int64), with the columns of ``COUNTED``
Exchanged: TypeAlias = tuple[dict[int, tuple[Any, State]], tf.Tensor]


class VariableStore(Store):
    """The states of variables before the step, which are read once, and after it.

    Args:
        binding: the owner of the variables, a :class:`hvd_compress.tensorflow.binding.Binding`.
        method: its method with the densities of now.
        places: indices of the variables with gradients.
        norm: of all gradients of this rank, or ``None`` if the method does not need it.

    Attributes:
        slots: the indices by name.
        new: the states after the step.
    """

    def __init__(self, binding: Any, method: Compressor, places: Sequence[int], norm: Any) -> None:
        self._binding, self._method, self._norm = binding, method, norm
        self.slots = {binding.slots[i].name: i for i in places}
        self._places = {slot.name: i for i, slot in enumerate(binding.slots)}
        self._read: dict[str, State] = {}
        self.new: dict[str, State] = {}

    def names(self) -> Iterable[str]:
        return self._places

    def get(self, name: str) -> State:
        if name not in self._read:
            variables = self._variables(name)
            self._read[name] = {key: variable.value() for key, variable in variables.items()}
        return self._read[name]

    def keep(self, name: str, state: State) -> None:
        self.new[name] = {**self.new.get(name, {}), **state}

    def state_for(self, name: str, gradient: Any, method: Compressor) -> State:
        return self.get(name)

    def _variables(self, name: str) -> dict[str, tf.Variable]:
        return self._binding.states[str(self._places[name])]

    def prepared(self, name: str, gradient: Any, context: Context) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            gradient.set_shape(self._binding.slots[self.slots[name]].shape)
        return gradient

    def extent(self, name: str, gradient: Any) -> tuple[int, int]:
        slot = self._binding.slots[self.slots[name]]
        elements = slot.shape.num_elements()
        return elements, elements * slot.dtype.size

    def norm(self, gradients: Mapping[str, Any]) -> Any:
        return self._norm

    def multiplied(self, direction: Any, factor: float) -> Any:
        return scaled(direction, factor) if factor != 1 else direction

    def momentum(self, name: str) -> tuple[float, bool]:
        return self._binding.momentum, self._binding.nesterov

    def rows(self, name: str, gradient: Any, context: Context) -> Exchange | None:
        if not isinstance(gradient, tf.IndexedSlices):
            return None
        slot = self._binding.slots[self.slots[name]]
        method = self._method.for_tensor(name, tuple(slot.shape))
        return self._exchange_rows(method, slot, gradient, context)

    def _exchange_rows(
        self,
        method: Compressor,
        slot: Any,
        gradient: tf.IndexedSlices,
        context: Context,
    ) -> Exchange:
        """Exchange the gradient of an embedding: rows are clipped like all gradients, sent as the
        method's ``rows`` says, and take momentum after averaging."""
        own = merged(gradient)
        template = method.template(tf.zeros(slot.shape, slot.dtype))
        values = own.values
        for transform in template.transforms:
            if transform.needs_gradient_norm:
                values, _ = transform.update(values, {}, context)
        own = tf.IndexedSlices(values, own.indices, own.dense_shape)
        rows, variables = as_rows(method.rows_at(context)), self._variables(slot.name)
        residual = variables["residual"] if rows.keeps_residual else None
        outcome = yield from exchange_rows(own, slot.shape, context, rows, residual)
        waits = outcome.state
        if residual is None and keeps_residual(method):  # in another branch of the graph
            none = tf.zeros([0], variables["residual"].dtype)
            waits = {"residual": tf.IndexedSlices(none, tf.zeros([0], tf.int64))}
        if not self._binding.momentum_used()[0] or "velocity" not in variables:
            return outcome._replace(state=waits)
        state = {"velocity": variables["velocity"].value()}
        mean = backend.widen(tf.convert_to_tensor(outcome.mean))
        transform = momentum_after_averaging(*self._binding.momentum_used())
        direction, new = backend.choose(
            backend.all_finite(mean),
            lambda: transform.finish(mean, state, context),
            lambda: (mean, state),
        )
        direction = tf.cast(tf.reshape(direction, slot.shape), slot.dtype)
        return Outcome(outcome.mean, outcome.sent, new | waits, direction)


def exchange(reducer: Reducer, store: VariableStore, gradients: Mapping[int, Any]) -> Exchanged:
    """Return directions and new states, and what is to be counted.

    What variables have in common is in the state of the first of them, whoever keeps it and whether
    it has changed: branches of a graph must have results of one structure.
    """
    names = {index: name for name, index in store.slots.items()}
    # Gradients of the last layers are there first.
    directions = reducer.reduce({names[i]: gradients[i] for i in reversed(list(gradients))})
    results: dict[int, tuple[Any, State]] = {}
    finder, homes = reducer.homes, set()
    for name, direction in directions.items():
        home, state = finder.home(name), finder.own(name, store.new[name])
        if home is not None and home not in homes:
            homes.add(home)
            state |= finder.common(name, store.get(home))
            state |= finder.common(name, store.new.get(home, {}))
        results[store.slots[name]] = direction, state
    return results, _counts(reducer, store)


def _counts(reducer: Reducer, store: VariableStore) -> tf.Tensor:
    """All numbers in one constant, but for those that are known only when the graph runs."""
    counts = np.zeros((len(list(store.names())), len(COUNTED)), np.int64)
    places, symbols = [], []
    for name, record in reducer.records.items():
        for column, field in enumerate(COUNTED):
            count = getattr(record, field)
            if tf.is_tensor(count):
                places.append((store.slots[name], column))
                symbols.append(tf.cast(count, tf.int64))
            else:
                counts[store.slots[name], column] = count
    if not symbols:
        return tf.constant(counts)
    return tf.tensor_scatter_nd_update(counts, places, tf.stack(symbols))


def scaled(gradient: Any, factor: Any) -> Any:
    """Return a tensor or rows times a number."""
    if isinstance(gradient, tf.IndexedSlices):
        values = backend.scale(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return backend.scale(gradient, factor)
