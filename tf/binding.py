"""The binding of a compressor to variables: their state, and the graph that averages gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import tensorflow as tf

from hvd_compress.agreement import listed
from hvd_compress.base import Compressor, Context
from hvd_compress.config import is_number
from hvd_compress.engines.base import Engine
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError
from hvd_compress.integrations.options import HorovodOptions
from hvd_compress.methods.texts import as_fixed
from hvd_compress.reduce import Reducer
from hvd_compress.reduce.reducer import check_momentum
from hvd_compress.schedules import schedules_of, with_values
from hvd_compress.stats import Record, Stats, norm_of_residual

from . import backend
from .runtime import Common, Number, Runtime, check_context, check_device
from .saved_state import BindingState
from .slots import TensorSlot, merged, names_of_groups, on_values
from .store import COUNTED, Exchanged, VariableStore, copy_of, exchange, scaled

logger = logging.getLogger("hvd_compress")

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


class VariableBinding(BindingState):
    """A method with its state for some variables, from ``hvd.bind`` or ``optimizer.compression``::

        binding = hvd.bind(hvd.TopK(density=0.01), model.trainable_variables)
        print(binding.stats().line())

    ``tf.train.Checkpoint(model=model, compression=binding)`` saves and restores it.

    Args:
        runtime, compression: what carries the exchanges, and the method.
        slots: the variables.
        options: Horovod's, those of a call without them; ``groups`` are lists of indices into
            ``slots``, or the number of lists.
        momentum, nesterov: of the optimizer, which must not apply them again.
        alone: a world of one, for gradients that stay on their rank.

    >>> w = tf.Variable(tf.ones(1000))
    >>> binding = hvd.bind(hvd.TopK(density=0.01), [w])
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(w * w)
    >>> tape = hvd.DistributedGradientTape(tape, compression=binding)
    >>> int(tf.math.count_nonzero(tape.gradient(loss, w)))
    10
    """

    #: those that exist
    alive: ClassVar[weakref.WeakSet[VariableBinding]] = weakref.WeakSet()

    def __init__(
        self,
        runtime: Runtime,
        compression: Any,
        slots: Sequence[TensorSlot],
        options: HorovodOptions | None = None,
        *,
        momentum: float = 0.0,
        nesterov: bool = False,
        alone: bool = False,
    ) -> None:
        check_context()
        method = as_fixed(compression)
        if options is None:
            options = HorovodOptions.checked(runtime.hvd, method)
        if not is_number(momentum) or momentum < 0:
            raise ConfigError(f"momentum must be a number from 0; got {momentum!r}")
        check_device("device_dense", options.device_dense)
        check_device("device_sparse", options.device_sparse)
        self._runtime, self._alone = runtime, alone
        self.options, self._set = options, options.process_set
        sums = options.op == runtime.hvd.Sum
        self.store = VariableStore(method, slots, options.seed, sums, momentum, nesterov)
        self._schedules = schedules_of(method)
        super().__init__()
        method.bind(self)
        VariableBinding.alive.add(self)

    def for_synchronization(self, method: Compressor) -> VariableBinding:
        """Return another binding of the same variables and ranks, for arrays that are not
        gradients.  It always averages, and its messages are counted here."""
        options = dataclasses.replace(
            self.options, op=self._runtime.hvd.Average, sparse_as_dense=False
        )
        other = VariableBinding(self._runtime, method, self.store.slots, options)
        self.on_behalf.append(other)
        return other

    # -- what users call ---------------------------------------------------------------------

    def stats(self) -> Stats:
        """Return the exact bytes so far and the norm of the residuals, by variable and in total."""
        records, store = {}, self.store
        store.abandon()
        rows = zip(store.slots, store.counts.numpy(), store.states.values(), strict=True)
        for slot, counts, state in rows:
            record = records[slot.name] = Record(
                **dict(zip(COUNTED, map(int, counts), strict=True))
            )
            values = {key: variable.value() for key, variable in state.items()}
            record.residual_norm = norm_of_residual(values) or 0.0
        for binding in self.on_behalf:
            for name, record in binding.stats().layers.items():
                records[name].bytes_sent += record.bytes_sent
                records[name].bytes_received += record.bytes_received
        return Stats(records)

    def reset_stats(self) -> None:
        """Begin at zero with all that :meth:`stats` counts."""
        for binding in (self, *self.on_behalf):
            binding.store.counts.assign(tf.zeros_like(binding.store.counts))

    def set_epoch(self, epoch: float) -> None:
        """Announce the epoch, which may be fractional such as 2.5, for schedules by epoch."""
        try:
            self.epoch.assign(float(epoch))
        except (TypeError, ValueError):
            raise ConfigError(f"epoch must be a number such as 2.5; got {epoch!r}") from None

    def report_at_exit(self) -> None:
        """Log one line of statistics when the program ends, on rank 0."""
        import atexit

        if self.engine.rank == 0:
            atexit.register(lambda: logger.info("%s: %s", self.method.name, self.stats().line()))

    def forget_graphs(self) -> None:
        super().forget_graphs()
        # Rows come in any number.
        self._traced = tf.function(self._reduce, autograph=False, reduce_retracing=True)

    # -- the exchange ------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Between ranks, or in a world of one, for ranks outside of the set."""
        if not self._alone and self._set.included() and self._set.size() > 1:
            return self._engine_after(None)
        return LocalEngine()

    def _engine_after(self, agreed: tf.Tensor | None) -> Engine:
        divisor = self.options.gradient_predivide_factor
        return self._runtime.engine(self._set, divisor, self.prefix, agreed)

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self,
        gradients: Sequence[Gradient],
        places: Sequence[int | None] | None = None,
        *,
        scale_local: bool = False,
        scale: tf.Tensor | None = None,
        common: Sequence[Common] = (),
    ) -> list[Gradient]:
        """Average gradients, and return the directions of the optimizer's step.

        Args:
            gradients: ``None`` stays ``None``, on all ranks alike.
            places: those of their slots; ``None`` for a gradient that stays on this rank, divided
                by the number of ranks if ``scale_local``.  By default all slots, in order.
            scale: the loss scale that is in the gradients and shall be in the results.
            common: what the ranks must have in common besides.
        """
        check_context()
        slots, size, results = self.store.slots, self.engine.size, list(gradients)
        shared: dict[int, int] = {}
        pairs = zip(range(len(slots)) if places is None else places, gradients, strict=True)
        for j, (place, gradient) in enumerate(pairs):
            if place is not None:
                shared[j] = place
                _check(slots[place], gradient)
            elif scale_local and gradient is not None:
                results[j] = on_values(lambda x: x / size, gradient)
        reduce = self._traced if tf.executing_eagerly() else self._reduce
        given = [results[j] for j in shared]
        averages = reduce(given, tuple(shared.values()), scale, tuple(common))
        for j, average in zip(shared, averages, strict=True):
            results[j] = average
        return results

    def _reduce(
        self,
        gradients: list[Gradient],
        places: tuple[int, ...],
        scale: tf.Tensor | None,
        others: tuple[Common, ...],
    ) -> list[Gradient]:
        present = {i: g for i, g in zip(places, gradients, strict=True) if g is not None}
        if self._undo:
            kept = [old.assign(copy_of(x), read_value=False) for x, old in self._undo]
            with tf.control_dependencies(kept):  # states are written in place
                present = tf.nest.map_structure(tf.identity, present, expand_composites=True)
        if self.options.sparse_as_dense:
            present = {i: tf.convert_to_tensor(g) for i, g in present.items()}
        if scale is not None:
            # In half precision what is left would vanish, or the factor be infinite.
            wide = {i: _cast(g, tf.float32) if g.dtype.size < 4 else g for i, g in present.items()}
            present = {i: scaled(g, 1 / scale) for i, g in wide.items()}
        engine = self._agreeing(present, others) if self.engine.size > 1 else self.engine
        norm = None
        if self.method.needs_gradient_norm and present:
            values = [merged(g).values if _is_rows(g) else g for g in present.values()]
            norm = tf.sqrt(tf.add_n([tf.square(backend.norm(x)) for x in values]))
        exchanged, counts = self._in_phase(engine, present, norm)
        results: dict[int, Gradient] = {}
        self.store.counts.assign_add(counts, read_value=False)
        for i, (direction, state) in exchanged.items():
            for key, value in state.items():
                variable = self.store.entry(i, key)
                if _is_rows(value):  # what has changed
                    variable.scatter_update(value)
                else:
                    variable.assign(value, read_value=False)
            if scale is not None:
                direction = scaled(direction, scale)
            results[i] = _cast(direction, self.store.slots[i].dtype)
        computed = tf.nest.flatten(list(results.values()), expand_composites=True)
        with tf.control_dependencies(computed):  # a step that fails is none
            self.step.assign_add(1, read_value=False)
        return [results.get(i) for i in places]

    def _agreeing(self, gradients: Mapping[int, Any], others: Sequence[Common]) -> Engine:
        """Return an engine that starts nothing before the ranks are known to agree."""
        terms: dict[str, Any] = {
            "method": repr(self.method),
            "op": "Sum" if self.store.sums else "Average",
            "gradient_predivide_factor": str(self.options.gradient_predivide_factor),
            "momentum, nesterov": "{}, {}".format(*self.store.taken),
            "seed": str(self.store.seed),
            "groups": str(self.options.groups),
            "sparse_as_dense": str(self.options.sparse_as_dense),
            "backward_passes_per_step": str(self.options.backward_passes_per_step),
            "variables": listed((slot.name, slot.shape) for slot in self.store.slots),
            "with gradients": [
                f"{self.store.slots[i].name} {g.dtype.name}{' of rows' if _is_rows(g) else ''}"
                for i, g in gradients.items()
            ],
        }
        numbers = {"step": Number(self.step.value()), "epoch": Number(self.epoch.value())}
        for other in others:
            terms |= other.terms
            numbers |= other.numbers
        checks = [self._runtime.agreement(Common(terms, numbers), self.prefix(), self._set)]
        if self.method.needs_epoch:  # or some collectives are on their way when this fails
            checks.append(self.store.known_epoch())
        with tf.control_dependencies(checks):
            agreed = tf.identity(checks[0])
        return self._engine_after(agreed)

    def _in_phase(self, engine: Engine, gradients: Mapping[int, Any], norm: Any) -> Exchanged:
        """Exchange with the densities of now.  A graph has a branch for each stage of a schedule,
        or for each phase of a method that has some."""
        step = self.step.value()
        exchange = functools.partial(self._exchange, engine, gradients, step, norm)
        if self.method.phases:
            if any(map(_is_rows, gradients.values())):
                raise ConfigError(
                    f"{self.method.name} needs dense gradients: pass sparse_as_dense=True to "
                    "hvd.DistributedOptimizer"
                )
            branches = [functools.partial(exchange, self.method, x) for x in self.method.phases]
            return tf.switch_case(self.method.phase_index(step + 1), branches)
        if not self._schedules:
            return exchange(self.method)
        stages = itertools.product(*(range(len(s.values)) for s in self._schedules))
        methods = [
            with_values(
                self.method,
                {s: s.values[i] for s, i in zip(self._schedules, chosen, strict=True)},
            )
            for chosen in stages
        ]
        if self._agree(methods, gradients, step):
            return exchange(methods[0])
        index = tf.constant(0)
        for schedule in self._schedules:
            count = self.step if schedule.unit == "step" else self.store.known_epoch()
            stage = tf.cast(tf.cast(count, tf.float64) / schedule.stage_length + 1e-9, tf.int32)
            number = len(schedule.values)
            index = index * number + tf.minimum(stage, number - 1)
        return tf.switch_case(index, [functools.partial(exchange, m) for m in methods])

    def _agree(
        self, methods: Sequence[Compressor], gradients: Mapping[int, Any], step: tf.Tensor
    ) -> bool:
        """Return whether the methods do the same to these gradients: a density means nothing to
        rows, and to tensors that are sent whole."""
        store, engine = self.store, self.engine
        context = Context(
            rank=engine.rank,
            size=engine.size,
            step=step,
            seed=store.seed,
            momentum=store.taken[0],
            nesterov=store.taken[1],
            sums=store.sums,
        )

        def what(method: Compressor, i: int, gradient: Any) -> Any:
            own = store.branch(method, None).method_for(store.slots[i])
            return own.rows_at(context) if _is_rows(gradient) else own.chain(gradient, context)

        done = [[what(m, i, g) for i, g in gradients.items()] for m in methods]
        return all(each == done[0] for each in done)

    def _exchange(
        self,
        engine: Engine,
        gradients: Mapping[int, Any],
        step: tf.Tensor,
        norm: Any,
        method: Compressor,
        phase: str = "",
    ) -> Exchanged:
        check_momentum(method, self.store.taken[0])
        results: dict[int, Any] = {}
        counts = tf.zeros_like(self.store.counts)
        for rows in (False, True):
            own = {i: g for i, g in gradients.items() if _is_rows(g) == rows}
            if not own:
                continue
            device = self.options.device_sparse if rows else self.options.device_dense
            with tf.device(device):
                if device:  # what is not touched before would stay where it was
                    own = tf.nest.map_structure(tf.identity, own, expand_composites=True)
                store = self.store.branch(method, norm)
                reducer = Reducer(
                    method,
                    engine,
                    store=store,
                    sums=self.store.sums,
                    seed=self.store.seed,
                    groups=names_of_groups(self.options.groups, self.store.slots, list(own)),
                    same_order=True,
                    scratch=self.store.scratch,
                )
                reducer.step, reducer.phase = step, phase
                part, counted = exchange(reducer, store, own)
            results |= part
            counts += counted
        return results, counts


def _check(slot: TensorSlot, gradient: Any) -> None:
    """Raise unless a gradient, if there is one, can be exchanged and belongs to its variable."""
    if gradient is None:
        return
    if not hasattr(gradient, "shape"):
        raise ConfigError(
            f"the gradient of {slot.name} must be a tensor, tf.IndexedSlices or None; got "
            f"{type(gradient).__name__}"
        )
    if not slot.shape.is_compatible_with(gradient.shape):
        raise ConfigError(
            f"the gradient of {slot.name} has shape {gradient.shape}, the variable {slot.shape}"
        )
    if isinstance(gradient, tf.Tensor):
        backend.check_gradient(gradient)


def _is_rows(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _cast(gradient: Any, dtype: tf.DType) -> Any:
    return on_values(lambda x: tf.cast(x, dtype), gradient)
