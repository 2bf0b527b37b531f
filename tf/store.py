"""The state of a method for some variables, and how a traced step knows it: states go in and come
out as symbols."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from hvd_compress.base import Compressor, Context, Exchange, Outcome, State
from hvd_compress.methods.rows import as_rows, exchange_rows, keeps_residual, rows_state
from hvd_compress.reduce import Reducer, Store
from hvd_compress.reduce.common_states import Kind, look_of
from hvd_compress.transforms import momentum_after_averaging

from . import backend
from .slots import TensorSlot, add_up, merged, on_values

#: what is counted in the graph: these fields of a ``Record``
COUNTED = ("steps", "bytes_sent", "bytes_received", "dense_bytes", "elements", "elements_sent")

#: (direction, state) by index of the variable, and for all variables what is counted: a row for
#: each (int64), with the columns of ``COUNTED``
Exchanged: TypeAlias = tuple[dict[int, tuple[Any, State]], tf.Tensor]


class VariableStore(Store):
    """All that a binding keeps from step to step: the only owner of method, seed, step and epoch.

    A graph is traced once and runs many times.  The method, the seed and the momentum are constants
    of a graph.  The step, the epoch and the states change from run to run, so they are
    ``tf.Variable``s.  A reducer owns nothing here: each branch of a graph has a reducer and a
    :meth:`branch` of this store.  Both are dropped once the branch is traced.

    Attributes:
        slots: the variables.
        sums: results are sums instead of averages.
        momentum, nesterov: of the optimizer, which must not apply them again.
        step, epoch: of the next exchange; -1 is no epoch.
        counts: what is counted, with a row for each slot and the columns of ``COUNTED``.
        states: the entries of states, by index of the slot and key.
        consolidated_at: the step at which all ranks had the same.
        scratch: memory for the loops of all graphs.
        new: in a branch, the states after the step.
    """

    new: dict[str, State]
    _read: dict[str, State]
    _norm: Any

    def __init__(
        self,
        method: Compressor,
        slots: Sequence[TensorSlot],
        seed: int,
        sums: bool,
        momentum: float,
        nesterov: bool,
    ) -> None:
        self.method, self.slots, self.seed, self.sums = method, list(slots), seed, sums
        self.taken = momentum, nesterov
        self.places = {slot.name: i for i, slot in enumerate(self.slots)}
        self.scratch: dict[str, Any] = {}
        self.states: dict[str, dict[str, tf.Variable]] = {}
        # Entries that variables have in common have a place before it is known which have
        # gradients: they are in the state of the first.
        homes: dict[Kind, int] = {}
        self._home_of: list[int] = []
        self.keys: list[tuple[str, ...]] = []  # of the states of dense gradients, by slot
        for i, slot in enumerate(self.slots):
            method, zeros = self.method_for(slot), tf.zeros(slot.shape, slot.dtype)
            common = method.common(zeros)
            self._home_of.append(homes.setdefault(look_of(common), i) if common else i)
            self.keys.append(tuple(method.init(zeros)))
        with tf.init_scope():
            self.step = variable(0, "step", tf.int64)
            self.epoch = variable(-1, "epoch", tf.float64)
            self.counts = variable(tf.zeros([len(slots), len(COUNTED)], tf.int64), "counts")
            for i, slot in enumerate(self.slots):
                name = re.sub(r"[^\w.-]", ".", slot.name)
                own, common = self.initial(i)
                self.states[str(i)] = {
                    key: variable(x, f"{name}.{key}") for key, x in (own | common).items()
                }
            self.consolidated_at = variable(0, "consolidated_at", tf.int64)

    def branch(self, method: Compressor, norm: Any) -> VariableStore:
        """Return this store for one branch of a graph, where a method has the densities of now.
        States of before the step are read once."""
        branch = copy.copy(self)
        branch.method, branch._norm = method, norm
        branch._read, branch.new = {}, {}
        return branch

    def method_for(self, slot: TensorSlot) -> Compressor:
        """Return the method of a slot."""
        return self.method.for_tensor(slot.name, tuple(slot.shape))

    def initial(self, i: int) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Return the state of a slot before the first step: its own, and what it keeps for all that
        have it in common."""
        slot = self.slots[i]
        method, zeros = self.method_for(slot), tf.zeros(slot.shape, slot.dtype)
        state, is_home = method.init(zeros), self._home_of[i] == i
        if slot.shape.rank:  # what gradients will be is not known yet
            state = rows_state(method, zeros) | state
        return state, method.common(zeros) if is_home else {}

    def entry(self, i: int, key: str) -> tf.Variable:
        """Return the entry of a state that the exchange of a slot has returned."""
        own = self.states[str(i)]
        return own[key] if key in own else self.states[str(self._home_of[i])][key]

    def abandon(self) -> None:
        """Give up the exchanges of a step that has failed: states are those of before it."""
        if "memory" in self.scratch:
            self.scratch["memory"].abandon()

    def entries(self) -> dict[str, tf.Variable]:
        """Return the states of all variables by slot and key."""
        self.abandon()
        states = self.states.items()
        return {f"{i}.{key}": x for i, own in states for key, x in own.items()}

    def per_rank(self, slot: TensorSlot) -> frozenset[str]:
        """Return the keys of a slot's state under which ranks differ."""
        method = self.method_for(slot)
        found = method.per_rank(tf.zeros(slot.shape, slot.dtype))
        return found | {"residual"} if keeps_residual(method) else found

    def differing(self) -> dict[str, tf.Variable]:
        """Return the entries in which ranks differ by slot and key, in the same order on all of
        them."""
        entries = self.entries()
        return {
            f"{i}.{key}": entries[f"{i}.{key}"]
            for i, slot in enumerate(self.slots)
            for key in sorted(self.states[str(i)].keys() & self.per_rank(slot))
        }

    def momentum_used(self) -> tuple[float, bool]:
        """Return the (momentum, nesterov) that act inside the exchange."""
        if not self.method.takes_momentum:
            return 0.0, False
        return self.method.momentum_inside(*self.taken)

    def known_epoch(self) -> tf.Tensor:
        """Return the epoch, which a graph checks when it runs."""
        check = tf.debugging.assert_greater_equal(
            self.epoch,
            tf.constant(0, tf.float64),
            message=f"ConfigError: the density of {self.method.name} goes by epochs: call "
            "compression.set_epoch(epoch) at the start of every epoch, or add "
            "hvd.callbacks.CompressionCallback() to model.fit",
        )
        with tf.control_dependencies([] if check is None else [check]):
            return self.epoch.value()

    # -- what the reducer of a branch asks ------------------------------------------------------

    def names(self) -> Iterable[str]:
        return self.places

    def variables(self, name: str) -> dict[str, tf.Variable]:
        return self.states[str(self.places[name])]

    def get(self, name: str) -> State:
        if name not in self._read:
            self._read[name] = {key: x.value() for key, x in self.variables(name).items()}
        return self._read[name]

    def keep(self, name: str, state: State) -> None:
        self.new[name] = {**self.new.get(name, {}), **state}

    def state_for(self, name: str, gradient: Any, method: Compressor) -> State:
        state = self.get(name)
        return {key: state[key] for key in self.keys[self.places[name]]}

    def prepared(self, name: str, gradient: Any, context: Context) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            gradient.set_shape(self.slots[self.places[name]].shape)
        return gradient

    def extent(self, name: str, gradient: Any) -> tuple[int, int]:
        slot = self.slots[self.places[name]]
        elements = slot.shape.num_elements()
        return elements, elements * slot.dtype.size

    def norm(self, gradients: Mapping[str, Any]) -> Any:
        return self._norm

    def multiplied(self, direction: Any, factor: float) -> Any:
        return scaled(direction, factor) if factor != 1 else direction

    def momentum(self, name: str) -> tuple[float, bool]:
        return self.taken

    def rows(self, name: str, gradient: Any, context: Context) -> Exchange | None:
        if not isinstance(gradient, tf.IndexedSlices):
            return None
        return self._exchange_rows(self.slots[self.places[name]], gradient, context)

    def _exchange_rows(
        self, slot: TensorSlot, gradient: tf.IndexedSlices, context: Context
    ) -> Exchange:
        """Exchange the gradient of an embedding: rows are clipped like all gradients, sent as the
        method's ``rows`` says, and take momentum after averaging.  A residual is read and written
        where rows were touched, and nowhere else."""
        own, width = merged(gradient), slot.shape[1:].num_elements()
        method, variables, values = self.method_for(slot), self.variables(slot.name), own.values
        for transform in method.template(tf.zeros(slot.shape, slot.dtype)).transforms:
            if transform.needs_gradient_norm:
                values, _ = transform.update(values, {}, context)
        values = tf.reshape(values, [tf.size(own.indices), width])
        rows, waiting, places = as_rows(method.rows_at(context)), None, tf.zeros([0], tf.int64)
        if rows.keeps_residual:
            places = own.indices[:, None] * width + tf.range(width, dtype=tf.int64)
            waiting = tf.gather(variables["residual"], places)
        found = yield from exchange_rows(
            rows,
            own.indices,
            values,
            waiting=waiting,
            n=slot.shape[0],
            context=context,
            merge=add_up,
        )
        mean = tf.reshape(found.values, [tf.size(found.indices), *slot.shape[1:]])
        mean, state = tf.IndexedSlices(mean, found.indices, gradient.dense_shape), {}
        if keeps_residual(method):  # in another branch of the graph, if not in this one
            left = tf.zeros([0], variables["residual"].dtype) if waiting is None else found.left
            changes = tf.IndexedSlices(tf.reshape(left, [-1]), tf.reshape(places, [-1]))
            state = {"residual": changes}
        if not self.momentum_used()[0] or "velocity" not in variables:
            return Outcome(mean, found.sent, state)
        velocity = {"velocity": variables["velocity"].value()}
        dense = backend.widen(tf.convert_to_tensor(mean))
        transform = momentum_after_averaging(*self.momentum_used())
        direction, new = backend.choose(
            backend.all_finite(dense),
            lambda: transform.finish(dense, velocity, context),
            lambda: (dense, velocity),
        )
        direction = tf.cast(tf.reshape(direction, slot.shape), slot.dtype)
        return Outcome(mean, found.sent, new | state, direction)


def exchange(reducer: Reducer, store: VariableStore, gradients: Mapping[int, Any]) -> Exchanged:
    """Return directions and new states, and what is to be counted.

    Entries that variables share are in the state of the first of them, changed or not.  Branches of
    a graph must have results of one structure.
    """
    names = list(store.places)
    # Gradients of the last layers are there first.
    directions = reducer.reduce({names[i]: gradients[i] for i in reversed(list(gradients))})
    results: dict[int, tuple[Any, State]] = {}
    finder, homes = reducer.common_states, set()
    for name, direction in directions.items():
        home, state = finder.home(name), finder.own(name, store.new[name])
        if home is not None and home not in homes:
            homes.add(home)
            state |= finder.common(name, store.get(home))
            state |= finder.common(name, store.new.get(home, {}))
        results[store.places[name]] = direction, state
    return results, _counts(reducer, store)


def _counts(reducer: Reducer, store: VariableStore) -> tf.Tensor:
    """All numbers in one constant, but for those that are known only when the graph runs."""
    counts = np.zeros((len(store.places), len(COUNTED)), np.int64)
    places, symbols = [], []
    for name, record in reducer.records.items():
        for column, field in enumerate(COUNTED):
            count = getattr(record, field)
            if tf.is_tensor(count):
                places.append((store.places[name], column))
                symbols.append(tf.cast(count, tf.int64))
            else:
                counts[store.places[name], column] = count
    if not symbols:
        return tf.constant(counts)
    return tf.tensor_scatter_nd_update(counts, places, tf.stack(symbols))


def scaled(gradient: Any, factor: Any) -> Any:
    return on_values(lambda x: backend.scale(x, factor), gradient)


def copy_of(variable: tf.Variable) -> tf.Tensor:
    """Return the value of a variable of the state, in memory of its own: that of the variable is
    written in place."""
    return tf.raw_ops.DeepCopy(x=variable.value())


def variable(value: Any, name: str, dtype: tf.DType | None = None) -> tf.Variable:
    """Return a variable of the state, which may be made while a graph is traced.

    A ``tf.function`` whose first trace makes variables is traced again, to have a graph that makes
    none.  This holds even for variables outside of the graph, in ``tf.init_scope``, and would
    double the time of the first step.  Variables that are not to be lifted out of the graph do not
    count.
    """
    return tf.Variable(
        value,
        trainable=False,
        dtype=dtype,
        name=name,
        experimental_enable_variable_lifting=False,
    )
