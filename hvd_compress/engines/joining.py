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
from collections.abc import Generator, Hashable, Sequence
from typing import Any, NamedTuple

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Averages, Context, Outcome, Place, Plan, Spec, State, Tensors
from hvd_compress.engines.counting import count, counted, share_out
from hvd_compress.requests import Batch, Collective, Joint
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


class Member:
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
class Placed:
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
        return BucketKey((Placed, self.place.form, self.place.key), False, self.extent[1], text)


Entry = Member | Placed


def groups_of(entries: Sequence[Entry]) -> tuple[list[list[Placed]], list[Member]]:
    """Return the tensors that have plans in common, and those that have exchanges of their own."""
    groups: dict[Hashable, list[Placed]] = {}
    for entry in entries:
        if isinstance(entry, Placed):
            groups.setdefault(entry.look.kind, []).append(entry)
    return [*groups.values()], [entry for entry in entries if isinstance(entry, Member)]


def plan_for(group: Sequence[Placed], step: Context, known: Plan | None = None) -> Plan:
    """Return the plan of tensors that have one in common: the ``known`` one if it is for them."""
    place, specs = group[0].place, []
    for each in group:
        shape = backend_of(each.gradient).shape(each.gradient)
        specs.append(Spec(each.name, shape, each.place.weight, each.place.x))
    if known is not None and known.is_for(place.form, specs, place.key, step):
        return known
    return place.form.plan(specs, place.key, step)


def tensors_of(group: Sequence[Placed]) -> Tensors:
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
    members: Sequence[Member], rank: int, size: int
) -> Generator[Collective, Any, dict[str, Outcome]]:
    """Run the exchanges of tensors that have their own; return the outcome of each by name.

    Args:
        members: the same on all ranks, in the same order.
        rank, size: this rank and the number of ranks.
    """
    while True:
        kinds: dict[Hashable, list[Member]] = {}
        for member in members:
            if member.request is not None:
                kinds.setdefault(member.request.kind, []).append(member)
        if not kinds:
            return {member.name: member.outcome for member in members if member.outcome is not None}
        if batch := kinds.get(Batch):  # first, since what is asked next may be of another kind
            replies = Batch.answers([member.request for member in batch])
            for member, reply in zip(batch, replies, strict=True):
                member.advance(reply)
            continue
        for group in kinds.values():
            is_joint = isinstance(group[0].request, Joint)
            yield from (_joint if is_joint else _collective)(group, rank, size)


def _collective(group: Sequence[Member], rank: int, size: int) -> Round:
    requests: list[Collective] = [member.request for member in group]
    if len(group) == 1:
        replies = [(yield requests[0])]
    else:
        kind = type(requests[0])
        replies = kind.cut(requests, (yield kind.join(requests)), rank)
    for member, request, reply in zip(group, requests, replies, strict=True):
        count(member.record, request, reply, rank, size)
        member.advance(reply)


def _joint(group: Sequence[Member], rank: int, size: int) -> Round:
    """Run an exchange that members have in common, which return what it has for each."""
    requests: list[Joint] = [member.request for member in group]
    record, weights = Record(), [request.weight for request in requests]
    arguments = [request.argument for request in requests]
    replies = yield from counted(requests[0].function(arguments), record, rank, size)
    share_out(record, [member.record for member in group], weights)
    for member, reply in zip(group, replies, strict=True):
        member.advance(reply)
