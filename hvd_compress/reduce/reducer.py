"""Averaging of gradients over the ranks.

A :class:`Reducer` owns the method, the step, the epoch, the seed, the records of bytes, and the
buckets.  States, and all that an optimizer knows, are in its :class:`~hvd_compress.reduce.Store`.
A custom training loop, in NumPy or over any backend's arrays, needs nothing else.  The bindings to
frameworks hand in a store of their own.  Under TensorFlow a reducer lives for one branch of a
graph, and gets method, step and seed from the binding's ``VariableStore``.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np

from hvd_compress.agreement import Terms
from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Array,
    Averages,
    Compressor,
    Context,
    Outcome,
    Plan,
    Sparse,
    State,
    Tensors,
)
from hvd_compress.config import check_seed
from hvd_compress.engines.base import Engine, asking
from hvd_compress.engines.joining import (
    Entry,
    PlacedTensor,
    Tally,
    TensorExchange,
    exchanged,
    groups_of,
    joined,
    plan_for,
    tensors_of,
)
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import CompressionError, ConfigError, UnsupportedError
from hvd_compress.methods import as_compressor
from hvd_compress.methods.optimizers import check_one_momentum
from hvd_compress.reduce.buckets import BUCKET_BYTES, Buckets, label_of
from hvd_compress.reduce.choice import Choice
from hvd_compress.reduce.common_states import CommonStates
from hvd_compress.reduce.nodes import Node, Sharing
from hvd_compress.reduce.state_file import (
    averaged,
    check_array,
    entry,
    header_of,
    read_header,
    refused,
)
from hvd_compress.reduce.store import MemoryStore, Store, Undo, misfit
from hvd_compress.requests import Max, Request
from hvd_compress.schedules import schedules_of
from hvd_compress.stats import Record, Stats, norm_of_residual
from hvd_compress.times import Clock

_NOTHING = np.empty(0)


class _InUse(NamedTuple):
    """The plan of a bucket, what the places in it depended on, and what it counts."""

    plan: Plan
    made_for: Hashable
    tally: Tally


@final
class Reducer:
    """Averages named gradients over the ranks of an engine::

        averages = reducer.reduce({"w": gradient})  # the same names on all ranks

    ``start`` takes gradients one by one, in any order, and ``finish`` returns the results.

    Args:
        compression: a method, its class, its name, or a text such as "dgc:density=0.01".
        engine: carries out the exchanges, for instance :class:`hvd_compress.mpi.MpiEngine`.
        store: keeps states and knows the optimizer; its caller binds the method, too.
        momentum, nesterov: of the optimizer, for methods that take them over, without a ``store``.
        sums: results are sums instead of averages.
        seed, groups, bucket_bytes, same_order, names: of random numbers; see :class:`.Buckets`.
        in_place: results may be written into the memory of the gradients.
        sparse: results may be :class:`hvd_compress.base.Sparse`, flat, each index once.
        scratch: memory for the loops of graphs that outlives this; see :class:`Context`.
        finds_unused: a tensor without a gradient on any rank keeps its state.
        node: whose ranks share the exchange; the engine is then ``node.between``.

    >>> reducer = Reducer("topk:density=0.5", LocalEngine())
    >>> [reducer.reduce({"w": np.array([4.0, 3.0])})["w"].tolist() for step in range(2)]
    [[4.0, 0.0], [0.0, 6.0]]
    >>> reducer.step, reducer.stats().total.density
    (2, 0.5)
    """

    #: one rank, too, exchanges over the engine that was given, for tests and benchmarks: NCCL takes
    #: one rank per GPU
    keeps_engine: ClassVar[bool] = False

    def __init__(
        self,
        compression: Any,
        engine: Engine,
        *,
        store: Store | None = None,
        momentum: float = 0.0,
        nesterov: bool = False,
        sums: bool = False,
        seed: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
        groups: Sequence[Sequence[str]] | None = None,
        same_order: bool = False,
        names: Sequence[str] = (),
        in_place: bool = False,
        sparse: bool = False,
        scratch: dict[str, Any] | None = None,
        finds_unused: bool = False,
        node: Node | None = None,
    ) -> None:
        self.compression: Compressor = as_compressor(compression)
        self.in_place, self.sparse_results = in_place, sparse
        self.choice = Choice() if self.compression.is_chosen_later else None
        self._use(self.compression if self.choice is None else self.choice.method)
        check_seed(seed)
        check_momentum(self.compression, momentum)
        self.store = MemoryStore(momentum, nesterov) if store is None else store
        if self.choice is not None:
            self.store.use(self.method)
        self.sums, self.seed = sums, seed
        self.step: Any = 0
        self.epoch: Any = None
        self.phase = ""
        self.learning_rate: float | None = None
        self._records: dict[str, Record] = {}
        self.clock = Clock()
        order: dict[str, Any] = {"groups": groups, "same_order": same_order, "names": names}
        # By which the ranks make buckets while there is no plan.
        self._divided: dict[str, str | list[str]] = {"bucket_bytes": str(bucket_bytes)}
        if groups is not None:
            self._divided["groups"] = [", ".join(group) for group in groups]
        self.intake = self.buckets = Buckets(
            lambda: self.engine,
            self._entries,
            self._exchange,
            bucket_bytes if node is None else -(-bucket_bytes // node.ranks),
            go_on=self._go_on,
            **order,
        )
        self._whole: dict[str, Array] = {}  # gradients that are divided among the ranks of a node
        self.node, self._sharing = node, None
        if node is not None:
            self._sharing = Sharing(
                node, self._whole, self._take, in_place, nbytes=bucket_bytes, **order
            )
            self.intake = self._sharing.buckets
        self._now: Hashable = None  # what this step's places depend on but gradients
        self._plans: dict[tuple[str, ...], _InUse] = {}  # by the names of a bucket
        self._local, self._shared = LocalEngine(), engine
        self._current: Engine | None = None  # of the step that has begun
        self._deferred: dict[str, Array] = {}  # gradients, until the norm of all is known
        self._in_flight: dict[str, Array] = {}  # gradients
        self._common = Context()  # what the contexts of all tensors have in common in this step
        self._scratch = scratch
        self._buckets: list[tuple[str, ...]] | None = None  # that plans were made for
        self._planned_for = engine.size  # ranks for which the buckets were planned
        self.common_states = CommonStates(self.store.names, self.store.get)
        self._undo, self.keeps_undo = Undo(self.store), False
        self.finds_unused, self._unused = finds_unused, set[str]()
        self._agrees = False  # the ranks have begun to compare terms in this step
        if engine.is_collective:
            comparing = self._comparing
            comparing.agree(self._terms(), self.store.for_messages(_NOTHING))
            comparing.finish()
        if store is None:
            self.compression.bind(self)

    def _use(self, method: Compressor) -> None:
        self.method, self._text, self._schedules = method, repr(method), schedules_of(method)
        self._is_steady = method.is_steady and self.in_place

    @property
    def engine(self) -> Engine:
        """The engine between the ranks, or a local one if there is only one rank; elastic training
        changes the number of ranks between steps."""
        if self._current is not None:  # to ask for the number of ranks takes long
            return self._current
        return self._shared if self._shared.size > 1 or self.keeps_engine else self._local

    @property
    def _comparing(self) -> Engine:
        """The engine over which the ranks compare their terms."""
        return self.engine if self.node is None else self.node.everyone

    @property
    def is_alone(self) -> bool:
        """Whether there is one rank only."""
        return self.node is None and self.engine.size == 1

    @property
    def records(self) -> dict[str, Record]:
        for in_use in self._plans.values():
            in_use.tally.settle(self._records)
        return self._records

    def _forget_plans(self) -> None:
        for in_use in self._plans.values():
            in_use.tally.settle(self._records)
        self._plans.clear()

    def reduce(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Average gradients, and return the direction of the optimizer's step by name.

        It is the average, or its momentum if the method applies it.  Shape and dtype are those of
        the gradient, and all ranks get the same bits."""
        self.start_together(gradients)
        return self.finish()

    def start(self, name: str, gradient: Array) -> None:
        """Begin to exchange one gradient, without waiting for other ranks."""
        self.start_together({name: gradient})

    def start_together(self, gradients: Mapping[str, Array], unused: Iterable[str] = ()) -> None:
        """Begin to exchange several gradients that became ready at once; see :meth:`start`.

        Args:
            gradients: by name.
            unused: the names of those that this rank has no gradient for but zeros, where
                ``finds_unused``.
        """
        with self.clock:
            self._start_together(gradients, unused)

    def _start_together(self, gradients: Mapping[str, Array], unused: Iterable[str]) -> None:
        for others in (self._in_flight, self._deferred, self._whole):
            if twice := gradients.keys() & others.keys():
                raise ConfigError(
                    f"{twice.pop()!r} was started already: call finish() once per step"
                )
        if self.epoch is None and self.method.needs_epoch:
            raise ConfigError(
                f"the density of {self.method.name} goes by epochs: call "
                f"{self.store.set_epoch_call} at the start of every epoch"
            )
        self._begin_step()
        if self.intake.plan:  # else nothing leaves, and nobody may have to wait, before finish()
            self._begin_agreement(next(iter(gradients.values()), _NOTHING))
        if unused := set(unused):
            self._unused |= unused
            self._undo.keep(unused)
        if self._sharing is not None:
            self._sharing.start(gradients)
        elif self.method.needs_gradient_norm:
            self._deferred.update(gradients)
        else:
            self._launch(gradients)

    def _take(self, parts: dict[str, Array]) -> None:
        """Begin to exchange this rank's parts of averages over the node."""
        with self.clock:
            if self.method.needs_gradient_norm:
                self._deferred.update(parts)
            else:
                self._launch(parts)

    def _begin_step(self) -> None:
        """Prepare a step, unless it has begun."""
        if self._in_flight or self._deferred or self._whole or self._agrees:
            return
        if self.choice is not None:
            self.choice.gradient_is_ready(self.clock)
        self.clock.begin_step()
        self._current = self.engine
        if self._current.size != self._planned_for:  # which ranks see in the same step
            self._planned_for = self._current.size
            self.forget_plan()
        if self.keeps_undo or self.finds_unused:
            self._undo.forget()
        if self.keeps_undo:
            self._undo.keep(self.store.names())
        self._now = self._circumstances()
        self._common = Context(
            rank=self._current.rank,
            size=self._current.size,
            step=self.step,
            epoch=self.epoch,
            seed=self.seed,
            sums=self.sums,
            phase=self.phase,
            in_place=self.in_place,
            reads_device=self._current.reads_device,
            sparse=self.sparse_results,
            scratch=self._scratch,
        )

    def forget_plan(self) -> None:
        """Plan the buckets again after the next step.

        To be called on all ranks at the same time, for instance when they have exchanged their
        states.  Ranks that have come later have no plan.
        """
        self.buckets.forget()
        self.intake.forget()
        self._forget_plans()
        self._undo.forget()
        self._buckets = None
        if self.choice is not None:
            self.choice.backward.clear()

    def take_choice(self, choice: Choice) -> None:
        """Use the method that was chosen from the next step on, with states of its own.  To be
        called on all ranks between the same steps."""
        self.choice = choice
        if choice.method != self.method:
            self._use(choice.method)
            self.store.use(self.method)
            self.common_states = CommonStates(self.store.names, self.store.get)
            self.forget_plan()

    def finish(self) -> dict[str, Array]:
        """Wait for all gradients that were started, and return what :meth:`reduce` returns."""
        with self.clock:
            directions, gradients = self._finish()
        if self.choice is not None and not self.choice.why and self.engine.size > 1:
            self.choice.step_is_over(self.clock)
            with self.clock.paused():
                found = self.compression.decide(self, self.choice.backward, gradients, directions)
            if found is not None:
                self.take_choice(Choice(*found))
        return directions

    def _finish(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return directions and gradients by name."""
        self.clock.awaited()
        try:
            self._begin_step()
            # Other ranks may have started something.
            started = self._in_flight or self._deferred or self._whole
            self._begin_agreement(next(iter(started.values()), _NOTHING))
            if self._sharing is not None:
                self._comparing.compare()
                whole = next(iter(self._whole.values()), _NOTHING)
                self.intake.finish(self.store.for_messages(whole))
            if self._deferred or self.method.needs_gradient_norm:
                deferred, self._deferred = self._deferred, {}
                norm = self.store.norm(deferred)
                self._common = self._common._replace(gradient_norm=norm)
                self._launch(deferred)
            like = next(iter(self._in_flight.values()), _NOTHING)
            parts = self.buckets.finish(self.store.for_messages(like))
            if self._sharing is not None:
                self._comparing.finish()
        except BaseException:
            self.abandon()
            raise
        self._agrees = False
        self._undo.step = self.step if self.keeps_undo else None
        expected, self._in_flight, self._current = self._in_flight, {}, None
        self.step += 1
        self.clock.steps += 1
        directions: dict[str, Any] = {}
        found = [*itertools.chain.from_iterable(parts)]
        if dict in map(type, found):
            self.common_states.begin()
        for part in found:
            directions |= (
                {name: self._received(name, outcome) for name, outcome in part.items()}
                if isinstance(part, dict)
                else self._averaged(*part)
            )
        if self._buckets is not self.buckets.plan:  # plans of other buckets take memory
            self._forget_plans()
            self._buckets = self.buckets.plan
        if directions.keys() != expected.keys():
            raise CompressionError(f"lost on the way: {expected.keys() - directions.keys()}")
        if self.finds_unused and (names := self._whole or expected):
            for name in self._unused_everywhere(sorted(names), like):
                self._undo.put_back([name])
                if name in directions:  # not where other ranks of the node have all of it
                    zeros = backend_of(directions[name]).full_like(directions[name], 0.0)
                    directions[name] = zeros
        if self._sharing is not None:
            directions = self._sharing.spread(directions)
        return directions, expected

    def _unused_everywhere(self, names: Sequence[str], like: Array) -> list[str]:
        """Return the tensors that no rank has a gradient for.  This is a collective."""
        unused, self._unused = self._unused, set()
        used = np.array([name not in unused for name in names], np.int64)
        like = self.store.for_messages(like)
        xp = backend_of(like)
        found = xp.to_numpy(self._comparing.run("used", asking(Max(xp.from_numpy(used, like)))))
        return [name for name, any_ in zip(names, found, strict=True) if not any_]

    def keep_undo(self) -> None:
        """Keep the states of before each step from now on, for :meth:`discard`.  They take as much
        memory once more, and the time to copy them.  To be called on all ranks.

        Raises:
            UnsupportedError: the method is "auto", which changes methods between steps.
        """
        self._check_at_rest("keep_undo()")
        if self.choice is not None:
            raise UnsupportedError(
                f"{self.compression.name} learns from each step, which cannot be discarded: name "
                "the method that it has chosen"
            )
        self.keeps_undo = True

    def discard(self) -> None:
        """Undo the last step, whose averages are not used: states and the number of the step are
        those of before.  Gradients under way are finished first, which is a collective; so it is to
        be called on all ranks.

        Raises:
            ConfigError: the states of before were not kept, or there is no step to discard.
        """
        if not self.keeps_undo:
            raise ConfigError(
                "to discard a step takes the states of before it: call "
                f"{self.store.keep_undo_call} once, before training"
            )
        if self.has_begun:
            self.finish()
        if self._undo.step is None:
            raise ConfigError(
                "there is no step to discard: none has been exchanged since the last one was used, "
                "discarded or loaded"
            )
        self.step = self._undo.step
        self._undo.put_back(list(self.store.names()))
        self._undo.forget()
        self.common_states.forget()

    @property
    def can_discard(self) -> bool:
        """Whether there is a step whose averages may not have been used."""
        return self._undo.step is not None

    def forget_undo(self) -> None:
        """Take the averages of the last step for used: it cannot be discarded any more."""
        if self.keeps_undo or self.finds_unused:
            self._undo.forget()

    def abandon(self) -> None:
        """Discard everything in flight, because the collectives failed or a checkpoint was
        loaded."""
        self._in_flight, self._deferred, self._agrees, self._current = {}, {}, False, None
        self._forget_plans()
        self._unused = set()
        self._undo.forget()
        if self._sharing is not None:
            self._sharing.abandon()
        self.clock.awaited()
        if self.choice is not None:
            self.choice.step_is_abandoned()
        self.common_states.forget()
        self._local.abandon()
        self.buckets.abandon()

    def _received(self, name: str, outcome: Outcome) -> Array:
        """Keep the state of a finished exchange, and return the direction of the step."""
        own, common = self.common_states.split(name, outcome.state)
        self.store.keep(name, own)
        for home, state in common.items():
            self.store.keep(home, state)
        sent = outcome.sent.values if isinstance(outcome.sent, Sparse) else outcome.sent
        self._records[name].elements_sent += backend_of(sent).size(sent)
        if self.sums and outcome.additive:
            return self.store.multiplied(outcome.direction, self.engine.size)
        return outcome.direction

    def _averaged(self, in_use: _InUse, found: Averages, record: Record) -> dict[str, Array]:
        """The same of a bucket, by name, which has sent and received as many bytes as ``record``
        has."""
        plan = in_use.plan
        in_use.tally.count(record, found.counts)
        for i, state in found.states.items():
            self.store.keep(plan.names[i], state)
        directions, size = found.directions, self.engine.size if self.sums else 1
        if size != 1 and plan.additive:
            directions = [self.store.multiplied(direction, size) for direction in directions]
        return dict(zip(plan.names, directions, strict=True))

    def _begin_agreement(self, like: Array) -> None:
        """Begin the comparison with the other ranks, once per step."""
        if not self._agrees:
            terms = {**self._terms(), **self.store.numbers()}
            # Where a schedule says how much is sent, ranks that differ would wait for each other.
            at_once = bool(self._schedules)
            self._comparing.agree(terms, self.store.for_messages(like), at_once)
            self._agrees = True

    def _launch(self, gradients: Mapping[str, Array]) -> None:
        self._in_flight.update(gradients)
        self.buckets.start(gradients)

    def _circumstances(self) -> Hashable:
        """Return all that the places of this step depend on but gradients; ``None`` if steps may
        differ all the same."""
        if not self._is_steady:
            return None
        if (of_store := self.store.circumstances()) is None:
            return None
        schedules = [schedule(self.step, self.epoch) for schedule in self._schedules]
        return self.engine.rank, self.engine.size, self.sums, of_store, *schedules

    def _go_on(self, names: tuple[str, ...]) -> Generator[Request, Any, Any] | None:
        """Return the exchange of a bucket by the plan that it has, without asking the method for
        places.  ``None``: these may have changed."""
        if self._now is None or names not in self._plans:
            return None
        in_use = self._plans[names]
        if in_use.made_for != self._now:
            return None
        gradients = [self._in_flight[name] for name in names]
        if [gradient.shape for gradient in gradients] != in_use.plan.shapes:
            return None  # as long as before, and yet other rows and columns
        if (found := self.store.of_bucket(names, gradients)) is None:
            return None
        tensors = Tensors(gradients, *found)
        return self._by_plan(in_use, tensors) if in_use.plan.takes(tensors) else None

    def _by_plan(self, in_use: _InUse, tensors: Tensors) -> Generator[Request, Any, list[Any]]:
        record = Record()
        averages = yield from exchanged(in_use.plan, tensors, self._common, record)
        return [(in_use, averages, record)]

    def _entries(self, names: Sequence[str]) -> list[Entry]:
        """Find out how the tensors of a bucket are exchanged, and begin what each has of its
        own."""
        return [self._entry(name, self._in_flight[name]) for name in names]

    def _entry(self, name: str, gradient: Array) -> Entry:
        context, store = self._context(name), self.store
        elements, nbytes = store.extent(name, gradient)
        gradient = store.prepared(name, gradient, context)
        exchange = store.rows(name, gradient, context)
        if exchange is None:
            method = self.method.for_tensor(name, backend_of(gradient).shape(gradient))
            state = store.state_for(name, gradient, method)
            # Also of a tensor with a place: in another step it may have none.
            common = self.common_states.hand(name, lambda: method.common(gradient))
            if (place := method.place(gradient, context)) is not None:
                extent = elements, nbytes
                return PlacedTensor(name, gradient, state, place, context.momentum, extent)
            exchange = method.exchange(gradient, {**state, **common}, context)
        record = self._records.setdefault(name, Record())
        record.steps += 1
        record.elements += elements
        record.dense_bytes += nbytes
        return TensorExchange(name, exchange, record, nbytes)

    def _exchange(self, entries: Sequence[Entry]) -> Generator[Request, Any, list[Any]]:
        groups, members = groups_of(entries)
        found: list[Any] = []
        for group in groups:
            found += yield from self._by_plan(self._in_use(group), tensors_of(group))
        if members:
            found.append((yield from joined(members, self.engine.rank, self.engine.size)))
        return found

    def _in_use(self, group: Sequence[PlacedTensor]) -> _InUse:
        """Return the plan of tensors that have one in common, and note it."""
        names, extents = tuple(each.name for each in group), [each.extent for each in group]
        known = self._plans.get(names)
        plan = plan_for(group, self._common, None if known is None else known.plan)
        if known is not None and plan is known.plan and extents == known.tally.extents:
            tally = known.tally
        else:
            if known is not None:
                known.tally.settle(self._records)
            tally = Tally(names, plan.weights, extents, plan.counts)
        # Gradients that are widened are looked at in every step.
        is_as_given = all(_dtype(each.gradient) == _dtype(each.place.x) for each in group)
        self._plans[names] = in_use = _InUse(plan, self._now if is_as_given else None, tally)
        return in_use

    def _context(self, name: str) -> Context:
        (momentum, nesterov), rate = self.store.momentum(name), self.store.rate(name)
        return self._common._replace(
            name=name,
            momentum=momentum,
            nesterov=nesterov,
            learning_rate=self.learning_rate if rate is None else rate,
        )

    def _terms(self) -> Terms:
        choice = {}
        if self.choice is not None:
            choice = {"compression": repr(self.compression), "choice": self.choice.term()}
        terms = self.store.terms(
            {
                "method": self._text,
                **choice,
                "op": "Sum" if self.sums else "Average",
                "seed": str(self.seed),
                "step": str(self.step),
                "epoch": str(self.epoch),
                "buckets": self.buckets.digest,
                **({} if self.intake.plan else self._divided),
                **({"finds unused": "True"} if self.finds_unused else {}),
                **({"keeps undo": "True"} if self.keeps_undo else {}),
            }
        )
        if self.node is not None:  # ranks of other places have other parts, in other buckets
            terms = {**terms, "buckets": str(bool(self.intake.plan)), "tensors so far": ""}
        return terms

    def stats(self) -> Stats:
        """Return the exact bytes so far and the norm of the residuals, by name and in total, and
        where the time of exchanges went."""
        records = self.records
        for name in self.store.names():
            if (norm := norm_of_residual(self.store.get(name))) is not None:
                records.setdefault(name, Record()).residual_norm = norm
        # Those of the first step, which had no plan yet, are of no interest later.
        buckets = {
            label_of(names): (names, times)
            for names, times in self.clock.buckets.items()
            if not self.buckets.plan or names in self.buckets.plan
        }
        choice = None if self.choice is None else self.choice.state()
        return Stats(records, self.clock.times, choice, buckets)

    def reset_stats(self) -> None:
        """Begin at zero with all that :meth:`stats` counts: called after every step, it makes them
        those of one step."""
        self._check_at_rest("reset_stats()")
        for in_use in self._plans.values():
            in_use.tally.clear()
        self._records.clear()
        self.clock.reset()

    @property
    def has_begun(self) -> bool:
        """Whether gradients were started since the last :meth:`finish`."""
        return bool(self._in_flight or self._deferred or self._whole)

    def poll(self) -> None:
        """Let messages that are under way go on; never waits."""
        if self.choice is not None:
            self.choice.gradient_is_ready(self.clock)
        if self._current is not None:
            if self.node is not None:
                self.node.inside.poll()
            self._current.poll()

    def is_under_way(self) -> bool:
        """Return whether gradients of a step are there that :meth:`finish` has not returned."""
        return self.has_begun or self.store.is_waiting()

    def _check_at_rest(self, call: str) -> None:
        """Raise ``ConfigError`` if gradients are under way: another exchange cannot come in
        between."""
        if self.is_under_way():
            finish = self.store.finish_call
            raise ConfigError(f"gradients are under way: call {finish} before {call}")

    def set_epoch(self, epoch: float) -> None:
        """Announce the epoch, which may be fractional such as 2.5, for schedules by epoch."""
        try:
            self.epoch = float(epoch)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"epoch must be a number, for instance 2.5; got {epoch!r}") from error

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self, *, consolidate: bool = True) -> dict[str, Any]:
        """Return the state for a checkpoint: arrays by name and key, and plain numbers.

        Args:
            consolidate: average the entries that differ between ranks.  This is a collective: call
                it on every rank, save the result on one, and load it on any number of ranks.
                Without it, every rank has to save and load its own state.
        """
        self._check_at_rest("state_dict()")
        store = self._memory()
        states = {name: dict(state) for name, state in store.states.items()}
        if consolidate and self.engine.size > 1:
            own = {f"{n}\n{key}": states[n][key] for n in states for key in store.per_rank[n]}
            for label, mean in self.average(own).items():
                name, key = label.split("\n")
                states[name][key] = mean
        return {
            **header_of(self, consolidate),
            "per_rank": {name: sorted(keys) for name, keys in store.per_rank.items()},
            "states": {
                name: {key: backend_of(x).copy(x) for key, x in state.items()}
                for name, state in states.items()
            },
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ConfigError: the state was made by another method or version, or it is damaged; then
                nothing has changed.
        """
        store, saved = self._memory(), read_header(state_dict)
        if (method := saved.method["method"]) != self.compression.name:
            raise refused(f"it is of {method}, and the method here is {self.compression.name}")
        choice = None if self.choice is None else Choice.read(saved.choice)
        everything, differing = (entry(state_dict, key, Mapping) for key in ("states", "per_rank"))
        if differing.keys() != everything.keys():
            raise refused("'per_rank' and 'states' are of different tensors")
        states: dict[str, State] = {}
        for name in everything:
            state, keys = entry(everything, name, Mapping), entry(differing, name, (list, tuple))
            if not all(isinstance(key, str) and key in state for key in keys):
                raise refused(f"'per_rank' names keys that the state of {name!r} has not")
            arrays = {key: check_array(f"{key!r} of {name!r}", x) for key, x in state.items()}
            states[name] = {key: backend_of(x).copy(x) for key, x in arrays.items()}
        from_before_the_first_step = not states and saved.step == 0
        if not from_before_the_first_step and (choice is None or choice.method == self.method):
            for name, expected in store.looks.of_states().items():  # others: with a gradient
                loaded = self.common_states.own(name, entry(states, name, dict))
                if problem := misfit(loaded, expected):
                    raise refused(f"of {name!r} {problem}")
        inconsistent: list[str] = []
        if any(differing.values()) and (factor := saved.share(self.engine)) != 1:
            inconsistent = [name for name, keys in differing.items() if keys]
            for name in inconsistent:
                states[name] |= {key: states[name][key] * factor for key in differing[name]}
        self.abandon()
        if choice is not None:
            self.take_choice(choice)
        self.step, self.epoch, self.seed = saved.step, saved.epoch, saved.seed
        per_rank = {name: frozenset(keys) for name, keys in differing.items()}
        store.replace(states, per_rank, inconsistent)

    def _memory(self) -> MemoryStore:
        if not isinstance(self.store, MemoryStore):
            raise UnsupportedError(
                "the states of this reducer are saved by what keeps them, such as an optimizer"
            )
        return self.store

    # -- between steps -----------------------------------------------------------------------

    def average(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the mean of each array over the ranks, by name.  This is a collective, and names
        must be the same on all ranks."""
        members = [
            TensorExchange(name, averaged(x, self.engine.size), Record(), x.nbytes)
            for name, x in sorted(arrays.items())
        ]
        outcomes = self.run(members, next(iter(arrays.values()), _NOTHING))
        return {name: outcomes[name].mean for name in arrays}

    def run(self, members: Sequence[TensorExchange], like: Array) -> dict[str, Outcome]:
        """Run exchanges between steps, in the same order on all ranks, of arrays like ``like``;
        return outcomes by name."""
        self._check_at_rest("an average between steps")
        by_name, like = {member.name: member for member in members}, self.store.for_messages(like)
        buckets = Buckets(
            lambda: self.engine,
            lambda names: [by_name[n] for n in names],
            lambda members: joined(members, self.engine.rank, self.engine.size),
            same_order=True,
        )
        buckets.start(by_name)
        return {name: x for part in buckets.finish(like) for name, x in part.items()}


def _dtype(x: Array) -> str:
    dtype: str = backend_of(x).dtype(x)
    return dtype


def check_momentum(method: Compressor, momentum: float) -> None:
    """Raise ``ConfigError`` unless a method can take over this momentum of the optimizer."""
    if momentum and not method.takes_momentum:
        raise ConfigError(
            f"{method.name} leaves momentum to the optimizer: drop momentum={momentum} "
            "here and apply it to what comes back"
        )
    check_one_momentum(method, momentum)
