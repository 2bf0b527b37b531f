"""Averaging of gradients over the ranks.

A :class:`Reducer` owns the method, the step, the epoch, the seed, the states, the records of bytes,
and the buckets.  A custom training loop, in NumPy or over any backend's arrays, needs nothing else.
The bindings to frameworks are subclasses, or make one for each graph that they trace.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.agreement import Terms, listed
from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Compressor, Context, Exchange, Outcome, Sparse, State
from hvd_compress.chain import Repeated
from hvd_compress.config import check_seed
from hvd_compress.engines.base import Engine
from hvd_compress.engines.buckets import BUCKET_BYTES, Buckets
from hvd_compress.engines.counting import Tally
from hvd_compress.engines.joining import BucketExchange, Form, Member, run_counted
from hvd_compress.engines.local import LocalEngine
from hvd_compress.errors import CompressionError, ConfigError
from hvd_compress.homes import Homes, Look, look
from hvd_compress.integrations.checkpoints import check_array, entry, epoch_in, refused, whole
from hvd_compress.integrations.optimizers import check_one_momentum
from hvd_compress.methods import as_compressor
from hvd_compress.requests import Sum
from hvd_compress.schedules import schedules_of
from hvd_compress.stats import Record, Stats, norm_of_residual
from hvd_compress.times import Clock

_VERSION = 1
_NOTHING = np.empty(0)


class _Again(NamedTuple):
    """What the exchange of a bucket returns that was like that of the step before; ``record`` has
    its bytes."""

    names: tuple[str, ...]
    weights: Sequence[int]
    gradients: Sequence[Array]
    directions: Sequence[Any]
    states: Sequence[State]
    record: Record


class Reducer:
    """Averages named gradients over the ranks of an engine, and keeps their states.

    ``reduce`` takes all gradients of a step at once.  ``start`` takes them one by one, as they
    become ready and in any order, and ``finish`` returns the results.  In each step all ranks must
    reduce the same names.

    Args:
        compression: a method, its class, its name, or a string such as "dgc:density=0.01".
        engine: carries out the exchanges, for instance :class:`hvd_compress.mpi.MpiEngine`.
        momentum, nesterov: those of the optimizer, for methods that take momentum over; the
            optimizer must not apply them again.
        sums: results are sums instead of averages.
        seed: the seed of random numbers that the ranks share.
        bucket_bytes: a bucket is sent when its gradients have this many bytes, uncompressed.
        groups: names of tensors that are sent together, whatever their size; all other tensors are
            sent one by one.
        same_order: all ranks start their gradients in the same order.
        names: of the tensors, if they are known beforehand, the first ones ready first.
        in_place: results may be written into the memory of the gradients.
        sparse: results may be :class:`hvd_compress.base.Sparse`, of flat arrays and without twice
            the same index, where no rank has sent the other elements.

    Attributes:
        method: the compressor.
        step, epoch: the step and epoch of the next exchange.
        learning_rate: of the next step, for methods that need it; ``None``: not told.
        states: the state of each tensor by name, as arrays by key.
        records: the bytes that each tensor has sent and received so far, by name.
        buckets: the assignment of tensors to buckets.
        clock: counts the time that exchanges take.
    """

    def __init__(
        self,
        compression: Any,
        engine: Engine,
        *,
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
    ) -> None:
        self.method: Compressor = as_compressor(compression)
        check_seed(seed)
        if momentum and not self.method.takes_momentum:
            raise ConfigError(
                f"{self.method.name} leaves momentum to the optimizer: drop momentum={momentum} "
                "here and apply it to what comes back"
            )
        check_one_momentum(self.method, momentum)
        self.momentum, self.nesterov, self.sums, self.seed = momentum, nesterov, sums, seed
        self.in_place, self.sparse_results = in_place, sparse
        self.step: Any = 0
        self.epoch: Any = None
        self.learning_rate: float | None = None
        self.states: dict[str, State] = {}
        self._records: dict[str, Record] = {}
        self._tallies: dict[tuple[str, ...], Tally] = {}  # by the names of a bucket
        self.clock = Clock()
        self.buckets = Buckets(
            lambda: self.engine,
            self._members,
            bucket_bytes,
            groups=groups,
            same_order=same_order,
            names=names,
            again=self._again,
        )
        self._now: Hashable = None  # what this step's exchanges depend on but gradients and states
        self._before: Hashable = None  # the same of the last step
        self._local, self._shared = LocalEngine(), engine
        self._current: Engine | None = None  # of the step that has begun
        self._per_rank: dict[str, frozenset[str]] = {}  # keys of states that differ between ranks
        self._deferred: dict[str, Array] = {}  # gradients, until the norm of all is known
        self._in_flight: dict[str, Array] = {}  # gradients
        self._whole_norm: Any = None  # of all gradients, for methods that need it
        #: what gradients look like, and the entries of states that fit them
        self._looks: dict[str, tuple[Look, dict[str, Look]]] = {}
        self._scratch: dict[str, dict[str, Any]] = {}  # see Context
        self._plan: list[tuple[str, ...]] | None = None  # the buckets that it was made for
        self._planned_for = engine.size  # ranks for which the buckets were planned
        self._homes = Homes(lambda: self._names(), lambda name: self._state_of(name))
        self._agrees = False  # the ranks have begun to compare terms in this step
        if engine.is_collective:
            self._begin_agreement(_NOTHING)
            engine.finish()
            self._agrees = False
        self._bind()

    def _bind(self) -> None:
        self.method.bind(self)

    @property
    def engine(self) -> Engine:
        """The engine between the ranks, or a local one if there is only one rank; elastic training
        changes the number of ranks between steps."""
        if self._current is not None:  # to ask for the number of ranks takes long
            return self._current
        return self._shared if self._shared.size > 1 else self._local

    @property
    def records(self) -> dict[str, Record]:
        for names, tally in self._tallies.items():
            tally.settle(names, self._records)
        return self._records

    def _close_tallies(self) -> None:
        for names, tally in self._tallies.items():
            tally.settle(names, self._records)
        self._tallies.clear()

    def reduce(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Average gradients, and return the direction of the optimizer's step by name: the average,
        or its momentum if the method applies it; shape and dtype are those of the gradient, and all
        ranks get the same bits."""
        self.start_together(gradients)
        return self.finish()

    def start(self, name: str, gradient: Array) -> None:
        """Begin to exchange one gradient, without waiting for other ranks."""
        self.start_together({name: gradient})

    def start_together(self, gradients: Mapping[str, Array]) -> None:
        """Begin to exchange several gradients that became ready at once; see :meth:`start`."""
        with self.clock.running():
            self._start_together(gradients)

    def _start_together(self, gradients: Mapping[str, Array]) -> None:
        for others in (self._in_flight, self._deferred):
            if twice := gradients.keys() & others.keys():
                raise ConfigError(f"{twice.pop()!r} was started already: call finish() once a step")
        if self.epoch is None and self.method.needs_epoch:
            raise ConfigError(
                f"the density of {self.method.name} goes by epochs: call {self._set_epoch} at the "
                "start of every epoch"
            )
        self._begin_step()
        self._begin_agreement(next(iter(gradients.values()), _NOTHING))
        if self.method.needs_gradient_norm:
            self._deferred.update(gradients)
        else:
            self._launch(gradients, None)

    def _begin_step(self) -> None:
        """Prepare a step, unless it has begun."""
        if self._in_flight or self._deferred or self._agrees:
            return
        self._current = self.engine
        if self._current.size != self._planned_for:  # which ranks see in the same step
            self._planned_for = self._current.size
            self.forget_plan()
        self._now = self._circumstances()

    def forget_plan(self) -> None:
        """Plan the buckets anew after the next step.  To be called on all ranks at the same time,
        for instance when they have exchanged their states: ranks that have come later have no plan.
        """
        self.buckets.forget()
        self._close_tallies()
        self._plan, self._scratch, self._before = None, {}, None

    #: the call that error messages tell users to write
    _set_epoch = "set_epoch(epoch)"

    def finish(self) -> dict[str, Array]:
        """Wait for all gradients that were started, and return what :meth:`reduce` returns.

        Raises:
            MismatchError: the ranks differ in method, options, step or tensors.
        """
        with self.clock.running():
            return self._finish()

    def _finish(self) -> dict[str, Array]:
        self.clock.awaited()
        try:
            self._begin_step()
            self._begin_agreement(_NOTHING)  # other ranks may have started something
            if self._deferred:
                deferred, self._deferred = self._deferred, {}
                self._launch(deferred, self._norm(deferred))
            like = next(iter(self._in_flight.values()), _NOTHING)
            parts = self.buckets.finish(self._for_messages(like))
        except BaseException:
            self.abandon()
            raise
        self._agrees, self._before = False, self._now
        if self._plan is not self.buckets.plan:  # what is kept for other buckets takes memory
            self._plan, self._scratch = self.buckets.plan, {}
        expected, self._in_flight, self._current = self._in_flight, {}, None
        self.step += 1
        self.clock.steps += 1
        self._homes.begin()
        directions: dict[str, Any] = {}
        for part in parts:
            directions |= (
                self._received_again(part)
                if isinstance(part, _Again)
                else {name: self._received(name, outcome) for name, outcome in part.items()}
            )
        if directions.keys() != expected.keys():
            raise CompressionError(f"lost on the way: {expected.keys() - directions.keys()}")
        return directions

    def abandon(self) -> None:
        """Discard everything in flight, because the collectives failed or a checkpoint was
        loaded."""
        self._in_flight, self._deferred, self._agrees, self._current = {}, {}, False, None
        self._scratch, self._before = {}, None
        self.clock.awaited()
        self._homes.forget()
        self._local.abandon()
        self.buckets.abandon()

    def _received(self, name: str, outcome: Outcome) -> Array:
        """Keep the state of a finished exchange, and return the direction of the step."""
        own, common = self._homes.split(name, outcome.state)
        self._keep(name, own)
        for home, state in common.items():
            self._keep(home, state)
        sent = outcome.sent.values if isinstance(outcome.sent, Sparse) else outcome.sent
        self._records[name].elements_sent += self._size(sent)
        if self.sums and outcome.additive:
            return self._multiplied(outcome.direction, self.engine.size)
        return outcome.direction

    def _received_again(self, bucket: _Again) -> dict[str, Array]:
        """The same of a bucket, by name."""
        tally = self._tallies.get(bucket.names)
        if tally is None or tally.weights != bucket.weights:
            gradients = zip(bucket.names, bucket.gradients, strict=True)
            extents = [self._extent(name, gradient) for name, gradient in gradients]
            if tally is not None:
                tally.settle(bucket.names, self._records)
            tally = self._tallies[bucket.names] = Tally(bucket.weights, extents)
        tally.count(bucket.record)
        self._keep_all(bucket.names, bucket.states)
        directions, size = bucket.directions, self.engine.size if self.sums else 1
        if size != 1:
            directions = [self._multiplied(direction, size) for direction in directions]
        return dict(zip(bucket.names, directions, strict=True))

    def _begin_agreement(self, like: Array) -> None:
        """Begin the comparison with the other ranks, once a step."""
        if not self._agrees:
            self.engine.agree(self._terms(), self._for_messages(like))
            self._agrees = True

    def _launch(self, gradients: Mapping[str, Array], norm: Any) -> None:
        self._in_flight.update(gradients)
        self._whole_norm = norm
        self.buckets.start(gradients)

    def _members(self, names: Sequence[str]) -> list[Member]:
        """Begin the exchanges of the tensors of a bucket."""
        members = []
        for name in names:
            gradient, record = self._in_flight[name], self._counted(name)
            exchange = self._exchange(name, gradient, self._context(name, self._whole_norm))
            members.append(Member(name, exchange, record, self._extent(name, gradient)[1]))
        return members

    def _counted(self, name: str) -> Record:
        """Count a gradient, and return the record of its tensor."""
        if (record := self._records.get(name)) is None:
            record = self._records[name] = Record()
        elements, nbytes = self._extent(name, self._in_flight[name])
        record.steps += 1
        record.elements += elements
        record.dense_bytes += nbytes
        return record

    def _circumstances(self) -> Hashable:
        """Return all that exchanges of this step depend on but gradients and states; ``None`` if
        steps may differ all the same."""
        if not self.method.is_steady or not self.in_place:
            return None
        schedules = [schedule(self.step, self.epoch) for schedule in schedules_of(self.method)]
        return self.engine.size, self.nesterov, self.sums, *schedules

    def _again(self, names: Sequence[str], form: Form) -> BucketExchange | None:
        """Return the exchange of a bucket that is like that of the step before, without asking the
        method what it would be; ``None`` if it may differ."""
        if self._now is None or self._now != self._before:
            return None
        if (tensors := self._repeated(names, form.weights)) is None:
            return None
        exchange = form.function.again(tensors, form.key, Context(sparse=self.sparse_results))
        return None if exchange is None else self._repeat(tuple(names), tensors, exchange)

    def _repeat(self, names: tuple[str, ...], tensors: Repeated, exchange: Any) -> Any:
        rank, size, record = self.engine.rank, self.engine.size, Record()
        directions, states = yield from run_counted(exchange, record, rank, size)
        return _Again(names, tensors.weights, tensors.gradients, directions, states, record)

    def _repeated(self, names: Sequence[str], weights: Sequence[int]) -> Repeated | None:
        """Return the tensors of a bucket that may be sent like in the step before, ``None`` if one
        differs."""
        gradients = [self._in_flight[name] for name in names]
        if any(name not in self.states for name in names):
            return None
        for gradient in gradients:
            backend_of(gradient).check_gradient(gradient, self.in_place)
        states = [self.states[name] for name in names]
        momenta = [self._momentum_of(name)[0] for name in names]
        return Repeated(gradients, states, momenta, weights, self._kept(names[0]))

    def _kept(self, name: str) -> dict[str, Any]:
        """Return what is kept for a tensor beside its state; see :class:`Context`."""
        return self._scratch.setdefault(name, {})

    def _context(self, name: str, norm: Any) -> Context:
        momentum, nesterov = self._momentum_of(name)
        return Context(
            name=name,
            rank=self.engine.rank,
            size=self.engine.size,
            step=self.step,
            epoch=self.epoch,
            seed=self.seed,
            momentum=momentum,
            nesterov=nesterov,
            gradient_norm=norm,
            sums=self.sums,
            scratch=self._kept(name),
            in_place=self.in_place,
            sparse=self.sparse_results,
            learning_rate=self._rate_of(name),
        )

    # Methods that bindings override.

    def _terms(self) -> Terms:
        """Return everything that must be the same on all ranks, as text."""
        return {
            "method": repr(self.method),
            "momentum, nesterov, sums": f"{self.momentum}, {self.nesterov}, {self.sums}",
            "seed": str(self.seed),
            "step": str(self.step),
            "epoch": str(self.epoch),
            "buckets": self.buckets.digest,
            "tensors so far": listed(
                (n, seen.shape) for n, (seen, _) in sorted(self._looks.items())
            ),
        }

    def _for_messages(self, like: Array) -> Array:
        """Return an array of the kind in which the ranks' comparison is sent."""
        return like

    def _momentum_of(self, name: str) -> tuple[float, bool]:
        return self.momentum, self.nesterov

    def _rate_of(self, name: str) -> Any:
        return self.learning_rate

    def _norm(self, gradients: Mapping[str, Array]) -> Any:
        """Return the L2 norm of all gradients of this rank."""
        return math.hypot(*(backend_of(g).norm(g) for g in gradients.values()))

    def _size(self, array: Array) -> int:
        """Return the number of elements."""
        return backend_of(array).size(array)

    def _extent(self, name: str, gradient: Array) -> tuple[int, int]:
        """Return the number of elements and of bytes of an uncompressed gradient."""
        return self._size(gradient), gradient.nbytes

    def _multiplied(self, direction: Any, factor: float) -> Any:
        if factor == 1:
            return direction
        if isinstance(direction, Sparse):
            return direction._replace(values=direction.values * factor)
        return direction * factor

    def _exchange(self, name: str, gradient: Array, context: Context) -> Exchange:
        xp = backend_of(gradient)
        method = self.method.for_tensor(name, xp.shape(gradient))
        if name not in self.states:
            self.states[name] = method.init(gradient)
            self._per_rank[name] = method.per_rank(gradient)
        is_new, state = name not in self._looks, self.states[name]
        expected = self._expected(name, method, gradient)
        if is_new and (shared := method.common(gradient)).keys() & state.keys():
            expected = expected | {key: look(x) for key, x in shared.items()}
        keys = state.keys() if is_new else expected.keys() & state.keys()
        self._check_state(name, gradient, {key: state[key] for key in keys}, expected)
        common = self._homes.hand(name, lambda: method.common(gradient))
        return method.exchange(gradient, {**self.states[name], **common}, context)

    def _names(self) -> Iterable[str]:
        """Return the names of all tensors with a state."""
        return self.states

    def _state_of(self, name: str) -> State:
        return self.states[name]

    def _keep(self, name: str, state: State) -> None:
        """Keep new entries of a state."""
        self.states[name] = {**self.states.get(name, {}), **state}

    def _keep_all(self, names: Sequence[str], states: Sequence[State]) -> None:
        for name, state in zip(names, states, strict=True):
            self._keep(name, state)

    def _expected(self, name: str, method: Compressor, gradient: Array) -> dict[str, Look]:
        """Return what the entries of a state look like that fits a gradient."""
        seen = look(gradient)
        if name not in self._looks or self._looks[name][0] != seen:
            fresh = method.init(gradient)
            self._looks[name] = seen, {key: look(x) for key, x in fresh.items()}
        return self._looks[name][1]

    def _check_state(
        self, name: str, gradient: Array, state: State, expected: Mapping[str, Look]
    ) -> None:
        """Raise ``ConfigError`` unless a state looks as expected: users may have given its arrays
        other memory since the last step."""
        if problem := _misfit({key: look(x) for key, x in state.items()}, expected):
            raise ConfigError(
                f"the gradient of {name!r} has {backend_of(gradient).size(gradient)} elements, and "
                f"of its state {problem}: one name belongs to one tensor, and a state to its model "
                "and options"
            )

    def stats(self) -> Stats:
        """Return the exact bytes so far and the norm of the residuals, by name and in total, and
        where the time of exchanges went."""
        for name, state in self.states.items():
            if (norm := norm_of_residual(state)) is not None:
                self.records.setdefault(name, Record()).residual_norm = norm
        return Stats(self.records, self.clock.times)

    def reset_stats(self) -> None:
        """Begin at zero with all that :meth:`stats` counts: called after every step, it makes them
        those of one step."""
        self._check_at_rest("reset_stats()")
        self._tallies.clear()
        self._records.clear()
        self.clock.reset()

    def is_under_way(self) -> bool:
        """Return whether gradients were started since the last :meth:`finish`."""
        return bool(self._in_flight or self._deferred)

    #: the call that error messages tell users to write
    _finishing = "finish()"

    def _check_at_rest(self, call: str) -> None:
        """Raise ``ConfigError`` if gradients are under way: another exchange cannot come in
        between."""
        if self.is_under_way():
            raise ConfigError(f"gradients are under way: call {self._finishing} before {call}")

    def set_epoch(self, epoch: float) -> None:
        """Announce the epoch, which may be fractional such as 2.5, for schedules by epoch."""
        self.epoch = float(epoch)

    # -- checkpoints -------------------------------------------------------------------------

    def state_dict(self, *, consolidate: bool = True) -> dict[str, Any]:
        """Return the state for a checkpoint: arrays by name and key, and plain numbers.

        Args:
            consolidate: average the entries that differ between ranks.  This is a collective: call
                it on every rank, save the result on one, and load it on any number of ranks.
                Without it, every rank has to save and load its own state.
        """
        self._check_at_rest("state_dict()")
        states = {name: dict(state) for name, state in self.states.items()}
        if consolidate and self.engine.size > 1:
            self._consolidate(states)
        return {
            "version": _VERSION,
            "method": self.method.to_config(),
            "step": self.step,
            "epoch": self.epoch,
            "seed": self.seed,
            "per_rank": {name: sorted(keys) for name, keys in self._per_rank.items()},
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
        version = whole(state_dict, "version")
        if version != _VERSION:
            raise refused(f"it has version {version}, not {_VERSION}")
        saved = entry(entry(state_dict, "method", Mapping), "method", str)
        if saved != self.method.name:
            raise refused(f"it is of {saved}, and the method here is {self.method.name}")
        step, epoch = whole(state_dict, "step"), epoch_in(state_dict)
        seed = whole(state_dict, "seed", -(2**63))
        per_rank, states = self._loaded(state_dict)
        self.abandon()
        self.step, self.epoch, self.seed = step, epoch, seed
        self._per_rank, self.states, self._looks = per_rank, states, {}

    def _loaded(
        self, state_dict: Mapping[str, Any]
    ) -> tuple[dict[str, frozenset[str]], dict[str, State]]:
        """Return the keys that differ between ranks, and copies of the arrays, both by name."""
        per_rank: dict[str, frozenset[str]] = {}
        states: dict[str, State] = {}
        everything = entry(state_dict, "states", Mapping)
        differing = entry(state_dict, "per_rank", Mapping)
        if differing.keys() != everything.keys():
            raise refused("'per_rank' and 'states' are of different tensors")
        for name in everything:
            state, keys = entry(everything, name, Mapping), entry(differing, name, (list, tuple))
            if not all(isinstance(key, str) and key in state for key in keys):
                raise refused(f"'per_rank' names keys that the state of {name!r} has not")
            states[name] = {}
            for key, x in state.items():
                check_array(f"{key!r} of {name!r}", x)
                states[name][key] = backend_of(x).copy(x)
            per_rank[name] = frozenset(keys)
        for name, (_, expected) in self._looks.items():  # others: with their first gradient
            loaded = self._homes.own(name, entry(states, name, dict))
            if problem := _misfit({key: look(x) for key, x in loaded.items()}, expected):
                raise refused(f"of {name!r} {problem}")
        return per_rank, states

    def _consolidate(self, states: dict[str, State]) -> None:
        own = {f"{n}\n{key}": states[n][key] for n in states for key in self._per_rank[n]}
        for label, mean in self.average(own).items():
            name, key = label.split("\n")
            states[name][key] = mean

    def average(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the mean of each array over the ranks, by name.  This is a collective, and names
        must be the same on all ranks."""
        size = self.engine.size

        def averaged(x: Array) -> Exchange:
            total = yield Sum(x)
            return Outcome(total / size, x, {})

        outcomes = self._run(
            [Member(name, averaged(x), Record(), x.nbytes) for name, x in sorted(arrays.items())],
            next(iter(arrays.values()), _NOTHING),
        )
        return {name: outcomes[name].mean for name in arrays}

    def _run(self, members: Sequence[Member], like: Array) -> dict[str, Outcome]:
        """Run exchanges between steps, in the same order on all ranks, of arrays like ``like``;
        return outcomes by name."""
        self._check_at_rest("an average between steps")
        by_name, like = {member.name: member for member in members}, self._for_messages(like)
        buckets = Buckets(
            lambda: self.engine, lambda names: [by_name[n] for n in names], same_order=True
        )
        buckets.start(by_name)
        return {name: x for part in buckets.finish(like) for name, x in part.items()}


def _misfit(state: Mapping[str, Look], expected: Mapping[str, Look]) -> str:
    """Return how what a state looks like differs from what was expected; an empty text if it
    fits."""
    if state.keys() != expected.keys():
        return f"there is {sorted(map(str, state))} where {sorted(expected)} was expected"
    for key, there in expected.items():
        here = state[key]
        if here[:2] != there[:2]:
            kinds = (f"{seen.dtype}{list(seen.shape)}" for seen in (here, there))
            return f"{key!r} is {' instead of '.join(kinds)}"
        if here != there:
            return f"{key!r} is on {here.device} instead of {there.device}"
    return ""
