"""The binding of a compressor to variables: their state, and the graph that averages gradients."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import tensorflow as tf

from hvd_compress.agreement import listed
from hvd_compress.base import Compressor, Context, Outcome
from hvd_compress.config import is_number, is_whole
from hvd_compress.engines.base import Engine
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import ConfigError
from hvd_compress.integrations.options import HorovodOptions
from hvd_compress.methods import as_fixed
from hvd_compress.reduce import Reducer
from hvd_compress.reduce.averages import averaged
from hvd_compress.reduce.reducer import check_momentum
from hvd_compress.reduce.state_file import lost
from hvd_compress.requests import Request
from hvd_compress.schedules import schedules_of, with_values
from hvd_compress.stats import Record, Stats, norm_of_residual

from . import backend, saved_state
from .rows import merged, on_values
from .runtime import Common, Number, Runtime, check_context, check_device
from .slots import TensorSlot, names_of_groups
from .store import COUNTED, BranchStore, Exchanged, VariableStore, exchange, scaled

logger = logging.getLogger("hvd_compress")

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


class Binding(tf.train.experimental.PythonState):
    """A method with its state for some variables.

    ``tf.train.Checkpoint(model=model, compression=binding)`` saves and restores it; see
    :mod:`.saved_state`.

    Args:
        runtime: what carries the exchanges.
        compression: a method, its class, its name, or a text such as "dgc:density=0.01".
        slots: the variables.
        options: Horovod's, those of a call without them; ``groups`` are lists of indices into
            ``slots`` that are sent together, or the number of lists.
        momentum, nesterov: of the optimizer, which must not apply them again.
        alone: a world of one, for gradients that stay on their rank.

    Attributes:
        store: the state, and the only owner of method, seed, step and epoch.
        consolidate_call, serves_all: what gives all ranks the same, and whether they have it.
        on_behalf: others whose messages count here as well.

    >>> w = tf.Variable(tf.ones(1000))
    >>> binding = hvd.bind(hvd.TopK(density=0.01), [w])
    >>> with tf.GradientTape() as tape:
    ...     loss = tf.reduce_sum(w * w)
    >>> tape = hvd.DistributedGradientTape(tape, compression=binding)
    >>> int(tf.math.count_nonzero(tape.gradient(loss, w)))
    10
    """

    _next_number: ClassVar[int] = 0
    #: those that exist
    alive: ClassVar[weakref.WeakSet[Binding]] = weakref.WeakSet()

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
        self._runtime = runtime
        self.options, self._set, self._alone = options, options.process_set, alone
        sums = options.op == runtime.hvd.Sum
        self.store = VariableStore(method, slots, options.seed, sums, momentum, nesterov)
        self._number: int | None = None
        self._schedules = schedules_of(method)
        self.on_behalf: list[Binding] = []
        self.consolidate_call = "compression.consolidate()"
        self.serves_all: Callable[[], bool] = lambda: self.is_consolidated
        self._averages: dict[tuple[str, ...], Any] = {}
        self.forget_graphs()
        method.bind(self)
        Binding.alive.add(self)

    def for_synchronization(self, method: Compressor) -> Binding:
        """Return another binding of the same variables and ranks, for arrays that are not
        gradients.  It always averages, and its messages are counted here."""
        options = dataclasses.replace(
            self.options, op=self._runtime.hvd.Average, sparse_as_dense=False
        )
        other = Binding(self._runtime, method, self.store.slots, options)
        self.on_behalf.append(other)
        return other

    # -- what users call ---------------------------------------------------------------------

    @property
    def method(self) -> Compressor:
        """The compressor in use."""
        return self.store.method

    @property
    def step(self) -> tf.Variable:
        """The number of exchanges so far."""
        return self.store.step

    @property
    def epoch(self) -> tf.Variable:
        """The epoch that was announced, -1 if none was."""
        return self.store.epoch

    @property
    def seed(self) -> int:
        """The seed of random numbers that the ranks share."""
        return self.store.seed

    def stats(self) -> Stats:
        """Return the exact bytes so far and the norm of the residuals, by variable and in total."""
        records, store = {}, self.store
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

    def keep_undo(self) -> None:
        """Keep the states of before each exchange from now on, for :meth:`discard`.  They take as
        much memory once more, and the time to copy them.  Call it on all ranks, before the first
        step: a ``tf.function`` that was traced before keeps nothing."""
        if not self.store.keeps_undo:
            self.store.keep_undo()
            self.forget_graphs()

    @tf.autograph.experimental.do_not_convert
    def discard(self) -> None:
        """Undo the last exchange, whose averages are not applied: states and the number of the step
        are those of before.  Call it on all ranks alike, eagerly or in a graph:

            compression = hvd.bind(hvd.TopK, variables)
            compression.keep_undo()  # once, before training
            ...
            averages = tape.gradient(loss, variables)
            if tf.linalg.global_norm(averages) < 100:
                optimizer.apply_gradients(zip(averages, variables))
            else:
                compression.discard()

        Raises:
            ConfigError: :meth:`keep_undo` was not called, or there is no exchange to discard; in a
                graph as a text in TensorFlow's ``InvalidArgumentError``.
        """
        self.store.discard()

    def report_at_exit(self) -> None:
        """Log one line of statistics when the program ends, on rank 0."""
        import atexit

        if self.engine.rank == 0:
            atexit.register(lambda: logger.info("%s: %s", self.method.name, self.stats().line()))

    def consolidate(self) -> None:
        """Give every rank the mean of the entries that differ between ranks: the mean residual is
        kept, and any number of ranks can load a checkpoint of one rank.

        This is a collective: call it on every rank before rank 0 saves.
        """
        self.store.forget_undo()
        self.store.consolidated_at.assign(self.step)
        self.average(self.store.differing())

    def average(self, own: Mapping[str, tf.Variable], what: str = "mean") -> None:
        """Give variables, by names that are the same on all ranks, their mean over the ranks; a
        collective.  ``what`` tells one call's names from another's."""
        size, names = self.engine.size, (what, *own)
        if size == 1 or not own:
            return

        def average() -> None:
            prefix = f"hvd_compress.{self.number}"
            engine = self._runtime.engine(self._set, 1.0, prefix, None)
            for name, variable in own.items():
                flat = tf.reshape(variable.value(), [-1])
                engine.start(f"{prefix}.{what}.{name}", _averaged(name, flat, size))
            for found in engine.finish().values():
                for name, outcome in found.items():
                    own[name].assign(tf.reshape(outcome.mean, own[name].shape))

        if names not in self._averages:
            self._averages[names] = tf.function(average, autograph=False)
        self._averages[names]()

    @property
    def is_consolidated(self) -> bool:
        """Whether what this rank has is what all have."""
        alone = self.engine.size == 1 or not self.store.differing()
        return alone or bool(self.store.consolidated_at == self.step)

    def broadcast(self, root_rank: int = 0) -> None:
        """Give all ranks the state of ``root_rank`` if they have come to different steps, because
        not all have loaded a checkpoint.  Of what differs between ranks, all get the mean over the
        ranks, for which those that are at other steps have nothing.  This is a collective."""
        for binding in self.on_behalf:
            binding.broadcast(root_rank)
        if self.engine.size == 1:
            return
        hvd = self._runtime.hvd
        own = tf.stack([self.step.value(), tf.cast(self.is_consolidated, tf.int64)])
        steps = hvd.allgather(own[:1], process_set=self._set).numpy()
        if len(set(steps.tolist())) == 1:
            return
        step, serves_all = hvd.broadcast(own, root_rank, process_set=self._set).numpy()
        if not serves_all and hvd.rank() == root_rank:
            warnings.warn(lost(f"{sum(steps == step)} of {len(steps)} ranks"), stacklevel=2)
        self._merge({} if serves_all else self.store.differing(), self.step == step, root_rank)

    def unite(self) -> None:
        """Give all ranks the state of rank 0 and, of what differs between ranks, the mean over
        those that have made a step, since in an elastic run new ranks have no residual.  This is a
        collective."""
        if self.engine.size == 1:
            return
        hvd = self._runtime.hvd
        # Those who come later have counted fewer.
        numbers = tf.constant([self.number, Binding._next_number])
        numbers = hvd.broadcast(numbers, 0, name="hvd_compress.numbers")
        self._number, Binding._next_number = map(int, numbers)
        has_begun = tf.cast(self.step > 0, tf.float64)
        part = hvd.allreduce(has_begun, op=hvd.Average, name="hvd_compress.has_begun")
        self._merge(self.store.differing(), self.step > 0, 0, part)

    def _merge(
        self,
        differing: Mapping[str, tf.Variable],
        counts: Any,
        root_rank: int,
        part: Any = 1.0,
    ) -> None:
        """Give all ranks the root's state and, of what differs, the sum over the ranks that count,
        divided by the number of all ranks and by ``part``; a collective."""
        roll_back = self.store.commit()
        for variable in differing.values():
            variable.assign(tf.where(counts, variable, tf.zeros_like(variable)))  # NaN * 0 is NaN
        self.average(differing)
        for variable in differing.values():
            variable.assign(tf.math.divide_no_nan(variable, tf.cast(part, variable.dtype)))
        averaged = set(map(id, differing.values()))
        common = [v for v in self.store.entries() if id(v) not in averaged]
        variables = [self.step, self.epoch, *common]
        self._runtime.hvd.broadcast_variables(variables, root_rank, self._set)
        found = {
            i: {key: variable.value() for key, variable in own.items()}
            for i, own in self.store.states.items()
        }
        try:
            saved_state.restore(self, saved_state.header_of(self, consolidated=True), found)
        except ConfigError:
            roll_back()
            raise

    def forget_graphs(self) -> None:
        """Trace new graphs, since the number of ranks is another one from now on."""
        self._averages.clear()
        # Rows come in any number.
        self._traced = tf.function(self._reduce, autograph=False, reduce_retracing=True)

    # -- the exchange ------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of this binding among all, by first use, which is in the same order on all
        ranks: names of collectives begin with it, since variables of two models may have the same
        names."""
        if self._number is None:
            self._number = Binding._next_number
            Binding._next_number += 1
        return self._number

    @property
    def engine(self) -> Engine:
        """Between ranks, or in a world of one, for ranks outside of the set."""
        if not self._alone and self._set.included() and self._set.size() > 1:
            return self._engine_after(None)
        return LocalEngine()

    def _engine_after(self, agreed: tf.Tensor | None) -> Engine:
        prefix = f"hvd_compress.{self.number}"
        return self._runtime.engine(
            self._set, self.options.gradient_predivide_factor, prefix, agreed
        )

    @tf.autograph.experimental.do_not_convert
    def reduce(
        self,
        gradients: Sequence[Gradient],
        indices: Sequence[int] | None = None,
        scale: tf.Tensor | None = None,
        common: Sequence[Common] = (),
    ) -> list[Gradient]:
        """Average gradients, and return the directions of the optimizer's step.

        Args:
            gradients: ``None`` stays ``None``, on all ranks alike.
            indices: of the slots that they belong to; all of them, in order, if ``None``.
            scale: the loss scale that is in the gradients and shall be in the results.
            common: what the ranks must have in common besides.
        """
        check_context()
        slots = self.store.slots
        places = tuple(range(len(slots))) if indices is None else _list("indices", indices)
        gradients = _list("gradients", gradients)
        if not all(is_whole(i) and 0 <= i < len(slots) for i in places):
            raise ConfigError(f"indices must be those of {len(slots)} variables; got {places}")
        if len(places) != len(gradients):
            raise ConfigError(f"{len(gradients)} gradients for {len(places)} variables")
        for i, gradient in zip(places, gradients, strict=True):
            self._check(slots[i], gradient)
        reduce = self._traced if tf.executing_eagerly() else self._reduce
        return reduce(list(gradients), places, scale, tuple(common))

    def _check(self, slot: TensorSlot, gradient: Gradient) -> None:
        if gradient is not None and not hasattr(gradient, "shape"):
            raise ConfigError(
                f"the gradient of {slot.name} must be a tensor, tf.IndexedSlices or None; got "
                f"{type(gradient).__name__}"
            )
        if gradient is not None and not slot.shape.is_compatible_with(gradient.shape):
            raise ConfigError(
                f"the gradient of {slot.name} has shape {gradient.shape}, the variable {slot.shape}"
            )
        if isinstance(gradient, tf.Tensor):
            backend.check_gradient(gradient)

    def _reduce(
        self,
        gradients: list[Gradient],
        places: tuple[int, ...],
        scale: tf.Tensor | None,
        others: tuple[Common, ...],
    ) -> list[Gradient]:
        present = {i: g for i, g in zip(places, gradients, strict=True) if g is not None}
        self.store.begin_step()
        engine = self._agreeing(present, others) if self.engine.size > 1 else self.engine
        if self.options.sparse_as_dense:
            present = {i: tf.convert_to_tensor(g) for i, g in present.items()}
        if scale is not None:
            # In half precision what is left would vanish, or the factor be infinite.
            wide = {i: _cast(g, tf.float32) if g.dtype.size < 4 else g for i, g in present.items()}
            present = {i: scaled(g, 1 / scale) for i, g in wide.items()}
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
            "momentum, nesterov": f"{self.store.momentum}, {self.store.nesterov}",
            "seed": str(self.store.seed),
            "variables": listed((slot.name, slot.shape) for slot in self.store.slots),
            "with gradients": [self.store.slots[i].name for i in gradients],
        }
        numbers = {"step": Number(self.step.value()), "epoch": Number(self.epoch.value())}
        for other in others:
            terms |= other.terms
            numbers |= other.numbers
        name = f"hvd_compress.{self.number}.agreement"
        checks = [self._runtime.agreement(Common(terms, numbers), name, self._set)]
        if self.method.needs_epoch:  # or some collectives are on their way when this fails
            checks.append(self.store.known_epoch())
        with tf.control_dependencies(checks):
            agreed = tf.identity(checks[0])
        return self._engine_after(agreed)

    def _in_phase(self, engine: Engine, gradients: Mapping[int, Any], norm: Any) -> Exchanged:
        """Exchange with the densities of now: a graph has a branch for each stage of a schedule, or
        for each phase of a method that has some."""
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
        stages = itertools.product(*(range(s.stages_in_all) for s in self._schedules))
        methods = [
            with_values(
                self.method,
                {s: s.in_stage(i) for s, i in zip(self._schedules, chosen, strict=True)},
            )
            for chosen in stages
        ]
        if self._agree(methods, gradients, step):
            return exchange(methods[0])
        index = tf.constant(0)
        for schedule in self._schedules:
            count = self.step if schedule.unit == "step" else self.store.known_epoch()
            stage = tf.cast(tf.cast(count, tf.float64) / schedule.stage_length + 1e-9, tf.int32)
            last = schedule.stages_in_all - 1
            index = index * schedule.stages_in_all + tf.minimum(stage, last)
        return tf.switch_case(index, [functools.partial(exchange, m) for m in methods])

    def _agree(
        self, methods: Sequence[Compressor], gradients: Mapping[int, Any], step: tf.Tensor
    ) -> bool:
        """Return whether the methods do the same to these gradients: a density means nothing to
        rows, and to tensors that are sent whole."""
        engine = self.engine
        context = Context(
            rank=engine.rank,
            size=engine.size,
            step=step,
            seed=self.store.seed,
            momentum=self.store.momentum,
            nesterov=self.store.nesterov,
            sums=self.store.sums,
        )

        def what(method: Compressor, slot: TensorSlot, gradient: Any) -> Any:
            own = method.for_tensor(slot.name, tuple(slot.shape))
            return own.rows_at(context) if _is_rows(gradient) else own.chain(gradient, context)

        done = [[what(m, self.store.slots[i], g) for i, g in gradients.items()] for m in methods]
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
        check_momentum(method, self.store.momentum)
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
                store = BranchStore(self.store, method, list(own), norm)
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

    # -- state -------------------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """Return all state as NumPy arrays, by flat names."""
        with tf.init_scope():
            return saved_state.to_arrays(self)

    def load_values(self, arrays: Mapping[str, Any]) -> None:
        """Take up what :meth:`values` gave.

        Raises:
            ConfigError: it belongs to another model, or it is damaged; then nothing has changed.
        """
        with tf.init_scope():  # a checkpoint may have waited for a step that is traced now
            saved_state.load(self, arrays)

    def serialize(self) -> bytes:
        """Return what ``tf.train.Checkpoint`` and Keras save; ``tf.saved_model.save`` leaves it
        out."""
        if not tf.executing_eagerly():
            return b""
        return saved_state.to_bytes(self)

    def deserialize(self, string_value: bytes) -> None:
        """Restore what :meth:`serialize` returned."""
        if string_value:
            self.load_values(saved_state.from_bytes(string_value))


def _list(option: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ConfigError(f"{option} must be a list; got {type(value).__name__}")
    return tuple(value)


def _averaged(name: str, x: tf.Tensor, size: int) -> Generator[Request, Any, dict[str, Outcome]]:
    """The exchange of a bucket of one flat tensor, whose outcome is its mean."""
    return {name: (yield from averaged(x, size))}


def _is_rows(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _cast(gradient: Any, dtype: tf.DType) -> Any:
    return on_values(lambda x: tf.cast(x, dtype), gradient)
