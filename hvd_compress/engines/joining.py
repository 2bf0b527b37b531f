"""One exchange for a bucket of tensors.

The exchanges of the tensors advance together.  In each round, requests of one kind are joined:
sums end to end, payloads into one message with a table of their sizes.  So the number and cost of
an engine's collectives grow with the number of buckets, not of tensors.

Results do not depend on how tensors are put into buckets: joining changes neither what is added nor
the order of the ranks.  Two things can change last bits.  A collective such as a ring may add in
another order at another place of its buffer.  A library may multiply a stack of matrices in another
order than one matrix (``Backend.batches``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Averages, Context, Outcome, Place, Plan, Spec, State, Tensors
from hvd_compress.requests import Batch, Collective, Joint
from hvd_compress.sharding import divided
from hvd_compress.stats import Record

Round = Generator[Collective, Any, None]


class BucketKey(NamedTuple):
    """The key by which a tensor falls into a bucket.

    It has the kind of its exchange, since those of one kind can be joined.  It says whether all
    tensors of this kind belong into one bucket.  It also has the bytes of the uncompressed
    gradient, and as text what must be the same on all ranks.
    """

    kind: Hashable
    together: bool
    nbytes: int
    first: str


class TensorExchange:
    """The exchange of one tensor, with its current ``request`` or, when it is finished, its
    ``outcome``.  The constructor runs the exchange up to its first request; this is where gradients
    are compressed.

    Args:
        name: the name of the tensor.
        exchange: a generator of requests, not yet begun.
        record: counts the bytes that the exchange sends and receives.
        nbytes: the bytes of the uncompressed gradient.

    Attributes:
        look: what decides about its bucket.
    """

    def __init__(
        self, name: str, exchange: Generator[Any, Any, Any], record: Record, nbytes: int = 0
    ) -> None:
        self.name, self.record, self._exchange = name, record, exchange
        self.request: Any = None
        self.outcome: Outcome | None = None
        self.advance(None)
        first = self.request
        kind, text = (None, "") if first is None else (first.kind, first.describe())
        self.look = BucketKey(kind, isinstance(first, Joint), nbytes, text)

    def advance(self, reply: Any) -> None:
        """Send the reply into the exchange; ``None`` before the first request."""
        try:
            self.request = self._exchange.send(reply)
        except StopIteration as stop:
            self.request, self.outcome = None, stop.value
        else:
            if isinstance(self.request, Collective):
                self.record.bytes_sent += self.request.nbytes


@dataclasses.dataclass(eq=False)
class PlacedTensor:
    """A tensor that is exchanged by the plan of its bucket.

    Attributes:
        name: the name of the tensor.
        gradient, state: its arrays.
        place: as its method has said.
        momentum: of the optimizer.
        extent: the elements and bytes of the uncompressed gradient.
        look: what decides about its bucket.
    """

    name: str
    gradient: Array
    state: State
    place: Place
    momentum: float
    extent: tuple[int, int] = (0, 0)

    @functools.cached_property
    def look(self) -> BucketKey:
        text = f"{self.place.kind} of weight {self.place.weight}"
        return BucketKey(
            (PlacedTensor, self.place.form, self.place.key), False, self.extent[1], text
        )


Entry = TensorExchange | PlacedTensor


def groups_of(entries: Sequence[Entry]) -> tuple[list[list[PlacedTensor]], list[TensorExchange]]:
    """Return the tensors that have plans in common, and those that have exchanges of their own."""
    groups: dict[Hashable, list[PlacedTensor]] = {}
    for entry in entries:
        if isinstance(entry, PlacedTensor):
            groups.setdefault(entry.look.kind, []).append(entry)
    return [*groups.values()], [entry for entry in entries if isinstance(entry, TensorExchange)]


def plan_for(group: Sequence[PlacedTensor], step: Context, known: Plan | None = None) -> Plan:
    """Return the plan of tensors that have one in common: the ``known`` one if it is for them."""
    place, specs = group[0].place, []
    for each in group:
        shape = backend_of(each.gradient).shape(each.gradient)
        specs.append(Spec(each.name, shape, each.place.weight, each.place.x))
    if known is not None and known.is_for(place.form, specs, place.key, step):
        return known
    return place.form.plan(specs, place.key, step)


def tensors_of(group: Sequence[PlacedTensor]) -> Tensors:
    """Return the tensors of a bucket for its plan."""
    return Tensors(
        [each.gradient for each in group],
        [each.state for each in group],
        "",
        [each.momentum for each in group],
        [each.place.x for each in group],
    )


def exchanged(
    plan: Plan, tensors: Tensors, step: Context, record: Record
) -> Generator[Collective, Any, Averages]:
    """Run the exchange of a bucket by its plan, and count its bytes to ``record``."""
    exchange = counted(plan.exchange(tensors, step), record, step.rank, step.size)
    averages: Averages = yield from exchange
    if tensors.flat is None:
        return averages
    own = enumerate(tensors.states)  # whose owner may not have them yet
    return averages._replace(states={i: {**old, **averages.states.get(i, {})} for i, old in own})


def joined(
    members: Sequence[TensorExchange], rank: int, size: int
) -> Generator[Collective, Any, dict[str, Outcome]]:
    """Run the exchanges of tensors that have their own; return the outcome of each by name.

    Args:
        members: the same on all ranks, in the same order.
        rank, size: this rank and the number of ranks.
    """
    while True:
        # First, since what is asked next may be of another kind.
        if batch := [member for member in members if isinstance(member.request, Batch)]:
            replies = Batch.answers([member.request for member in batch])
            for member, reply in zip(batch, replies, strict=True):
                member.advance(reply)
            continue
        kinds: dict[Hashable, list[TensorExchange]] = {}
        for member in members:
            if member.request is not None:
                kinds.setdefault(member.request.kind, []).append(member)
        if not kinds:
            return {member.name: member.outcome for member in members if member.outcome is not None}
        for group in kinds.values():
            is_joint = isinstance(group[0].request, Joint)
            yield from (_joint if is_joint else _collective)(group, rank, size)


def _collective(group: Sequence[TensorExchange], rank: int, size: int) -> Round:
    requests: list[Collective] = [member.request for member in group]
    if len(group) == 1:
        replies = [(yield requests[0])]
    else:
        kind = type(requests[0])
        replies = kind.cut(requests, (yield kind.join(requests)), rank)
    for member, request, reply in zip(group, requests, replies, strict=True):
        count(member.record, request, reply, rank, size)
        member.advance(reply)


def _joint(group: Sequence[TensorExchange], rank: int, size: int) -> Round:
    """Run an exchange that members have in common, which return what it has for each."""
    requests: list[Joint] = [member.request for member in group]
    record, weights = Record(), [request.weight for request in requests]
    arguments = [request.argument for request in requests]
    replies = yield from counted(requests[0].function(arguments), record, rank, size)
    share_out(record, [member.record for member in group], weights)
    for member, reply in zip(group, replies, strict=True):
        member.advance(reply)


def alone(
    exchange: Generator[Any, Any, Any], note: Callable[[Collective, Any], None] | None = None
) -> Generator[Collective, Any, Any]:
    """The exchange of a tensor in a bucket of its own, or of a bucket by its plan.  Requests for
    many tensors are answered here.  ``note(request, reply)`` learns of each of its collectives."""
    reply = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Batch):
            (reply,) = Batch.answers([request])
            continue
        if isinstance(request, Joint):
            (reply,) = yield from alone(request.function([request.argument]), note)
            continue
        reply = yield request
        if note is not None:
            note(request, reply)


def counted(
    exchange: Generator[Any, Any, Any], record: Record, rank: int, size: int
) -> Generator[Collective, Any, Any]:
    """Return an exchange whose bytes are counted to ``record``."""

    def note(request: Collective, reply: Any) -> None:
        record.bytes_sent += request.nbytes
        count(record, request, reply, rank, size)

    return alone(exchange, note)


def count(record: Record, request: Collective, reply: Any, rank: int, size: int) -> None:
    """Count what a request has sent beside its own bytes, and what it has received."""
    sent, received = request.count(reply, rank, size)
    if not isinstance(sent, int) or sent:  # a symbol and 0 would be a node of a graph
        record.bytes_sent += sent
    record.bytes_received += received


def share_out(record: Record, records: Sequence[Record], weights: Sequence[int]) -> None:
    """Count the bytes of a common exchange to tensors, by their weights."""
    bounds = np.array([0, *itertools.accumulate(weights)])
    sent, received = (_shares(n, bounds) for n in (record.bytes_sent, record.bytes_received))
    for own, its_sent, its_received in zip(records, sent, received, strict=True):
        own.bytes_sent = _plus(own.bytes_sent, its_sent)
        own.bytes_received = _plus(own.bytes_received, its_received)


def _shares(n: Any, bounds: np.ndarray) -> Sequence[Any]:
    """Return the parts of ``n``, a number or a symbol, between the bounds."""
    is_number = isinstance(n, int)
    if is_number and n * int(bounds[-1]) >= 2**63:
        bounds = bounds.astype(object)
    parts = divided(n, bounds[-1], bounds[:-1], bounds[1:])
    if is_number:
        found: list[int] = parts.tolist()
        return found
    return backend_of(n).unstack(parts)  # a few operations for all


def _plus(count: Any, n: Any) -> Any:
    """Return the sum.  A symbol is not added to 0, since each sum would be a node of its graph."""
    return n if isinstance(count, int) and count == 0 else count + n


#: numbers of bytes of steps that a :class:`Tally` remembers
_MOST_ALIKE = 64


class Tally:
    """Counts the steps of a bucket for all of its tensors at once.

    Args:
        names: of the tensors.
        weights: by which tensors share the bytes of a step.
        extents: the elements and bytes of their gradients, uncompressed.
        counts: how many elements are sent of each; ``None`` where each step says it.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[int],
        extents: Sequence[tuple[int, int]],
        counts: Sequence[int | None],
    ) -> None:
        self._names, self.weights, self.extents = names, weights, extents
        self._known = [0 if count is None else count for count in counts]
        self._bounds = np.array([0, *itertools.accumulate(weights)])
        self.clear()

    def clear(self) -> None:
        self._steps, self._sums = 0, np.zeros((3, len(self.weights)), np.int64)
        self._alike: dict[tuple[int, int], int] = {}  # steps, by the bytes sent and received
        self._symbols: list[list[Any]] = []  # the same of each step of a graph

    def count(self, record: Record, counts: Any = None) -> None:
        """Count a step.

        Args:
            record: the bytes of all.
            counts: how many elements were sent of each, where that was not known.
        """
        self._steps += 1
        sent, received = nbytes = record.bytes_sent, record.bytes_received
        if not (isinstance(sent, int) and isinstance(received, int)):
            found = [0] * len(self.weights) if counts is None else counts
            self._symbols.append([*(_shares(n, self._bounds) for n in nbytes), found])
            return
        if counts is not None:
            self._sums[2] += np.array(counts, np.int64)
        self._alike[nbytes] = self._alike.get(nbytes, 0) + 1
        if len(self._alike) > _MOST_ALIKE:
            self._share_out()

    def _share_out(self) -> None:
        alike, self._alike = self._alike, {}
        for nbytes, steps in alike.items():
            for row, n in zip(self._sums, nbytes, strict=False):
                row += steps * np.array(_shares(n, self._bounds), np.int64)

    def settle(self, records: dict[str, Record]) -> None:
        """Add what was counted to the records of the tensors."""
        if not self._steps:
            return
        self._share_out()
        own = [records.setdefault(name, Record()) for name in self._names]
        each = zip(own, self.extents, self._known, self._sums.T.tolist(), strict=True)
        for record, (elements, nbytes), known, (sent, received, found) in each:
            record.steps += self._steps
            record.elements += self._steps * elements
            record.dense_bytes += self._steps * nbytes
            record.elements_sent += self._steps * known + found
            record.bytes_sent += sent
            record.bytes_received += received
        for columns in self._symbols:
            for record, sent, received, found in zip(own, *columns, strict=True):
                record.bytes_sent = _plus(record.bytes_sent, sent)
                record.bytes_received = _plus(record.bytes_received, received)
                record.elements_sent = _plus(record.elements_sent, found)
        self.clear()
