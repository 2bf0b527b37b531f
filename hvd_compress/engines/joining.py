"""One exchange for a bucket of tensors.

The exchanges of the tensors advance together.  In each round, requests of one kind are joined:
sums end to end, payloads into one message with a table of their sizes.  So the number and cost of
an engine's collectives grow with the number of buckets, not of tensors.

Results do not depend on how tensors are put into buckets: joining changes neither what is added
nor the order of the ranks.  Two things can change last bits: a collective that adds in another
order at another place of its buffer, such as a ring, and a library that multiplies a stack of
matrices in another order than one matrix (``Backend.batches``).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any, NamedTuple

from hvd_compress.base import Outcome
from hvd_compress.engines.counting import share_out
from hvd_compress.requests import Batch, Collective, Joint, Request
from hvd_compress.stats import Record
from hvd_compress.times import phase

BucketExchange = Generator[Collective, Any, dict[str, Outcome]]
Round = Generator[Collective, Any, None]


class Look(NamedTuple):
    """The key by which a tensor falls into a bucket: the kind of its first request (requests of one
    kind can be joined), whether all tensors of this kind belong into one bucket, and the bytes of
    the uncompressed gradient."""

    kind: Hashable
    together: bool
    nbytes: int


class Form(NamedTuple):
    """The common exchange of all tensors of a bucket, with their key and weights; see
    :class:`hvd_compress.requests.Joint`."""

    function: Any
    key: Hashable
    weights: tuple[int, ...]


def form_of(members: Sequence[Member]) -> Form | None:
    """Return the form of a bucket whose exchanges were one; ``None`` if they were not."""
    one = members[0].first_request
    weights: list[int] = []
    if not isinstance(one, Joint) or one.together:
        return None
    for member in members:
        request = member.first_request
        if not isinstance(request, Joint) or request.kind != one.kind:
            return None
        weights.append(request.weight)
    return Form(one.function, one.key, tuple(weights))


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
        kind = None if self.request is None else self.request.kind
        together = isinstance(self.request, Joint) and self.request.together
        self.look = Look(kind, together, nbytes)
        self.first_request = self.request

    @property
    def first(self) -> str:
        """The properties of the first request that must be the same on all ranks, as text."""
        return "" if self.first_request is None else self.first_request.describe()

    def advance(self, reply: Any) -> None:
        """Send the reply into the exchange; ``None`` before the first request."""
        try:
            with phase("other"):
                self.request = self._exchange.send(reply)
        except StopIteration as stop:
            self.request, self.outcome = None, stop.value
        else:
            if isinstance(self.request, Collective):
                self.record.bytes_sent += self.request.nbytes


def joined(members: Sequence[Member], rank: int, size: int) -> BucketExchange:
    """Run the exchange of a bucket; it returns the outcome of each member by name.

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
        sent, received = request.count(reply, rank, size)
        if not isinstance(sent, int) or sent:  # a symbol and 0 would be a node of a graph
            member.record.bytes_sent += sent
        member.record.bytes_received += received
        member.advance(reply)


def _joint(group: Sequence[Member], rank: int, size: int) -> Round:
    requests: list[Joint] = [member.request for member in group]
    form = Form(requests[0].function, requests[0].key, tuple(r.weight for r in requests))
    arguments = [request.argument for request in requests]
    records = [member.record for member in group]
    replies = yield from run_form(form, arguments, records, rank, size)
    for member, reply in zip(group, replies, strict=True):
        member.advance(reply)


def run_form(
    form: Form, arguments: list[Any], records: Sequence[Record], rank: int, size: int
) -> Generator[Collective, Any, Any]:
    """Run the common exchange of a bucket, and return what it returns; its bytes are counted to all
    tensors by their weights."""
    record = Record()
    outcome = yield from run_counted(form.function(arguments), record, rank, size)
    share_out(record, records, form.weights)
    return outcome


def run_counted(
    exchange: Generator[Request, Any, Any], record: Record, rank: int, size: int
) -> Generator[Collective, Any, Any]:
    """Run the common exchange of a bucket, and return what it returns."""
    common = Member("", exchange, record)
    yield from joined([common], rank, size)
    return common.outcome
