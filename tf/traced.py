"""The reducer of one trace of a graph: states and counts are passed in and returned as symbols."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvd_compress.base import Compressor, Context, Exchange, Outcome, State
from hvd_compress.engines.base import Engine
from hvd_compress.methods.rows import as_rows, keeps_residual
from hvd_compress.reducer import Reducer
from hvd_compress.transforms import momentum_after_averaging

from . import backend
from .rows import exchange_rows, merged

#: what is counted in the graph: these fields of a ``Record``
COUNTED = ("steps", "bytes_sent", "bytes_received", "dense_bytes", "elements", "elements_sent")

#: (direction, state) by index of the variable, and for all variables what is counted: a row for
#: each (int64), with the columns of ``COUNTED``
Exchanged: TypeAlias = tuple[dict[int, tuple[Any, State]], tf.Tensor]


class TracedReducer(Reducer):
    """Exchanges the gradients of a :class:`hvd_compress.tensorflow.binding.Binding` once.

    Args:
        binding: the owner of the variables.
        engine: carries out the exchanges.
        method: its method with the densities of now.
        common: what the contexts of all tensors have in common.
        places: indices of the variables with gradients.
    """

    def __init__(
        self,
        binding: Any,
        engine: Engine,
        method: Compressor,
        common: Context,
        places: Sequence[int],
    ) -> None:
        self._binding, self._common = binding, common
        self._slots = {binding.slots[i].name: i for i in places}
        self._read: dict[str, State] = {}
        super().__init__(
            method,
            engine,
            momentum=common.momentum,
            nesterov=common.nesterov,
            sums=common.sums,
            seed=common.seed,
            groups=binding.names_of_groups(list(places)),
            same_order=True,
        )

    def exchange(self, gradients: Mapping[int, Any]) -> Exchanged:
        """Return directions and new states, and what is to be counted.

        What variables have in common is in the state of the first of them, whoever keeps it and
        whether it has changed: branches of a graph must have results of one structure.
        """
        names = {index: name for name, index in self._slots.items()}
        # Gradients of the last layers are there first.
        directions = self.reduce({names[i]: gradients[i] for i in reversed(list(gradients))})
        results: dict[int, tuple[Any, State]] = {}
        homes = set()
        for name, direction in directions.items():
            home, state = self._homes.home(name), self._homes.own(name, self.states[name])
            if home is not None and home not in homes:
                homes.add(home)
                old = self._homes.common(name, self._state_of(home))
                state |= old | self._homes.common(name, self.states.get(home, {}))
            results[self._slots[name]] = direction, state
        return results, self._counts()

    def _counts(self) -> tf.Tensor:
        """All numbers in one constant, but for those that are known only when the graph runs."""
        counts = np.zeros((len(self._binding.slots), len(COUNTED)), np.int64)
        places, symbols = [], []
        for name, record in self.records.items():
            for column, field in enumerate(COUNTED):
                count = getattr(record, field)
                if tf.is_tensor(count):
                    places.append((self._slots[name], column))
                    symbols.append(tf.cast(count, tf.int64))
                else:
                    counts[self._slots[name], column] = count
        if not symbols:
            return tf.constant(counts)
        return tf.tensor_scatter_nd_update(counts, places, tf.stack(symbols))

    def _bind(self) -> None:
        """Do nothing, since the owner of the variables is bound already."""

    def _begin_agreement(self, like: Any) -> None:
        """Do nothing, since the graph has compared everything."""

    def _context(self, name: str, norm: Any) -> Context:
        return self._common._replace(name=name)

    def _extent(self, name: str, gradient: Any) -> tuple[int, int]:
        slot = self._binding.slots[self._slots[name]]
        elements = slot.shape.num_elements()
        return elements, elements * slot.dtype.size

    def _norm(self, gradients: Mapping[str, Any]) -> Any:
        return self._common.gradient_norm

    def _multiplied(self, direction: Any, factor: float) -> Any:
        return scaled(direction, factor) if factor != 1 else direction

    def _exchange(self, name: str, gradient: Any, context: Context) -> Exchange:
        place = self._slots[name]
        slot = self._binding.slots[place]
        method = self.method.for_tensor(name, tuple(slot.shape))
        if isinstance(gradient, tf.IndexedSlices):
            return self._exchange_rows(method, slot, gradient, context)
        variables = self._state_of(name)
        if place in self._binding.sharing:  # else the graph would have zeros for each tensor
            fresh = functools.partial(method.common, tf.zeros(slot.shape, slot.dtype))
            variables = variables | self._homes.hand(name, fresh)
        return method.exchange(gradient, variables, context)

    def _names(self) -> Iterable[str]:
        return [slot.name for slot in self._binding.slots]

    def _state_of(self, name: str) -> State:
        """The values of the variables before the step."""
        if name not in self._read:
            variables = self._variables(name)
            self._read[name] = {key: variable.value() for key, variable in variables.items()}
        return self._read[name]

    def _variables(self, name: str) -> dict[str, tf.Variable]:
        place = next(i for i, slot in enumerate(self._binding.slots) if slot.name == name)
        return self._binding.states[str(place)]

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


def scaled(gradient: Any, factor: Any) -> Any:
    """Return a tensor or rows times a number."""
    if isinstance(gradient, tf.IndexedSlices):
        values = backend.scale(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return backend.scale(gradient, factor)
