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

import itertools
from collections.abc import Generator, Hashable, Sequence
from typing import Any, NamedTuple

from hvd_compress.aggregators.sparse_vectors import cut
from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Alltoall,
    Array,
    Batch,
    Broadcast,
    Collective,
    Gather,
    Joint,
    Local,
    Max,
    Neighbors,
    Outcome,
    Request,
    Sparse,
    SparseSum,
    SparseTotal,
    Sum,
)
from hvd_compress.engines.base import LENGTH, itemsize, payload_bytes
from hvd_compress.engines.counting import divided, share_out
from hvd_compress.errors import PayloadError
from hvd_compress.stats import Record
from hvd_compress.times import phase

BucketExchange = Generator[Collective, Any, dict[str, Outcome]]
Round = Generator[Collective, Any, None]


class Look(NamedTuple):
    """What decides which bucket a tensor belongs to: the kind of its first request (requests of one
    kind can be joined), whether all tensors of this kind belong into one bucket, and the bytes of
    the uncompressed gradient."""

    kind: Hashable
    together: bool
    nbytes: int


class Form(NamedTuple):
    """The common exchange of all tensors of a bucket, with their key and weights; see
    :class:`hvd_compress.base.Joint`."""

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
        if not isinstance(request, Joint) or kind_of(request) != kind_of(one):
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
        kind = None if self.request is None else kind_of(self.request)
        together = isinstance(self.request, Joint) and self.request.together
        self.look = Look(kind, together, nbytes)
        self.first_request = self.request

    @property
    def first(self) -> str:
        """The properties of the first request that must be the same on all ranks, as text."""
        return "" if self.first_request is None else describe(self.first_request)

    def advance(self, reply: Any) -> None:
        """Send the reply into the exchange; ``None`` before the first request."""
        try:
            with phase("other"):
                self.request = self._exchange.send(reply)
        except StopIteration as stop:
            self.request, self.outcome = None, stop.value
        else:
            if not isinstance(self.request, Local):
                self.record.bytes_sent += payload_bytes(self.request)


def joined(members: Sequence[Member], rank: int, size: int) -> BucketExchange:
    """Run the exchange of a bucket; it returns the outcome of each member by name.

    Args:
        members: the same on all ranks, in the same order.
        rank, size: this rank and the number of ranks.
    """
    while True:
        answer_batches(members)
        kinds: dict[Hashable, list[Member]] = {}
        for member in members:
            if member.request is not None:
                kinds.setdefault(kind_of(member.request), []).append(member)
        if not kinds:
            return {member.name: member.outcome for member in members if member.outcome}
        for group in kinds.values():
            yield from _ROUNDS[type(group[0].request)](group, rank, size)


def kind_of(request: Request) -> Hashable:
    """Return the kind of a request; requests of one kind can be joined."""
    if isinstance(request, Joint):
        return "joint", request.function, request.key
    if isinstance(request, Neighbors):
        return "neighbors", request.targets, request.sources, request.equal_sizes
    if isinstance(request, Alltoall):
        return "alltoall", request.equal_sizes
    if isinstance(request, Gather | Batch):
        return type(request).__name__.lower()
    if isinstance(request, SparseSum):
        return "sparse sum", request.wire, request.algorithm
    array = request.array
    look = backend_of(array).dtype(array), str(getattr(array, "device", None))
    if isinstance(request, Max):
        return "max", *look
    if isinstance(request, Broadcast):
        return "broadcast", request.root, *look
    return "sum", request.wire, request.algorithm, *look


def describe(request: Request) -> str:
    """Return the properties of requests that must be the same on all ranks, as text."""
    if isinstance(request, Batch):
        return "local work"
    if isinstance(request, Joint):
        return describe_joint(request.weight)
    if isinstance(request, Alltoall):
        sizes = [backend_of(p).size(p) for p in request.payloads] if request.equal_sizes else "some"
        return f"alltoall of {sizes}"
    if isinstance(request, Neighbors | Gather):
        size = backend_of(request.payload).size(request.payload) if request.equal_sizes else "some"
        return f"{type(request).__name__.lower()} of {size}"
    if isinstance(request, SparseSum):
        return f"sparse sum of {request.n} by {request.algorithm}"
    xp, array = backend_of(request.array), request.array
    wire = (isinstance(request, Sum) and request.wire) or xp.dtype(array)
    return f"{type(request).__name__.lower()} of {xp.size(array)} {wire}"


def describe_joint(weight: int) -> str:
    """Return what :func:`describe` returns for a ``Joint`` request of this weight."""
    return f"joint work of weight {weight}"


# -- one round of requests of one kind ----------------------------------------------------------


def _reduce(group: Sequence[Member], rank: int, size: int) -> Round:
    """Of ``Sum`` or ``Max``."""
    requests = [member.request for member in group]
    xp = backend_of(requests[0].array)
    sizes = [xp.size(request.array) for request in requests]
    for member, request in zip(group, requests, strict=True):
        if size > 1:
            member.record.bytes_received += payload_bytes(request)
    if len(group) == 1:
        group[0].advance((yield requests[0]))
        return
    flat = [xp.reshape(r.array, (n,)) for r, n in zip(requests, sizes, strict=True)]
    joint = requests[0]._replace(array=xp.concat(flat))
    reply = yield joint._replace(owned=True) if isinstance(joint, Sum) else joint
    parts = _cut(reply, sizes)
    for member, request, part in zip(group, requests, parts, strict=True):
        member.advance(xp.reshape(part, xp.shape(request.array)))


def _gather(group: Sequence[Member], rank: int, size: int) -> Round:
    requests: list[Gather] = [member.request for member in group]
    payloads = [request.payload for request in requests]
    xp = backend_of(payloads[0])
    sizes: list[Any] = [xp.size(payload) for payload in payloads]
    open_sizes = [i for i, request in enumerate(requests) if not request.equal_sizes]
    messages = yield Gather(_packed(xp, payloads, open_sizes), equal_sizes=not open_sizes)
    parts = [_unpacked(xp, m, sizes, open_sizes, sender) for sender, m in enumerate(messages)]
    for i, (member, request) in enumerate(zip(group, requests, strict=True)):
        own = [theirs[i] for theirs in parts]
        if size > 1:
            lengths = 0 if request.equal_sizes else LENGTH * size
            received = sum(xp.size(part) for part in own) + lengths
            member.record.bytes_received += received - payload_bytes(request)
        member.advance(own)


def _alltoall(group: Sequence[Member], rank: int, size: int) -> Round:
    requests: list[Alltoall] = [member.request for member in group]
    xp = backend_of(requests[0].payloads[0])
    equal = requests[0].equal_sizes
    messages = [
        _packed(xp, column, () if equal else range(len(group)))
        for column in zip(*(request.payloads for request in requests), strict=True)
    ]
    # Of equal sizes, all ranks have as many bytes for this one as it has for itself.
    sizes = [xp.size(request.payloads[rank]) for request in requests]
    parts = [
        _unpacked(xp, message, sizes, () if equal else range(len(group)), sender)
        for sender, message in enumerate((yield Alltoall(messages, equal)))
    ]
    for i, (member, n) in enumerate(zip(group, sizes, strict=True)):
        own = [theirs[i] for theirs in parts]
        received = sum(xp.size(part) for part in own) - n
        lengths = 0 if equal else LENGTH * (size - 1)
        member.record.bytes_received += received + lengths
        member.advance(own)


def _neighbors(group: Sequence[Member], rank: int, size: int) -> Round:
    request: Neighbors = group[0].request
    payloads = [member.request.payload for member in group]
    xp = backend_of(payloads[0])
    open_sizes = () if request.equal_sizes else range(len(group))
    messages = yield request._replace(payload=_packed(xp, payloads, open_sizes))
    sizes = [xp.size(payload) for payload in payloads]
    parts = [
        _unpacked(xp, message, sizes, open_sizes, sender)
        for sender, message in zip(request.sources, messages, strict=True)
    ]
    lengths = 0 if request.equal_sizes else LENGTH * len(parts)
    for i, member in enumerate(group):
        own = [theirs[i] for theirs in parts]
        member.record.bytes_received += sum(xp.size(part) for part in own) + lengths
        member.advance(own)


def _broadcast(group: Sequence[Member], rank: int, size: int) -> Round:
    requests: list[Broadcast] = [member.request for member in group]
    xp = backend_of(requests[0].array)
    sizes = [xp.size(request.array) for request in requests]
    for member, request, n in zip(group, requests, sizes, strict=True):
        nbytes = n * itemsize(xp.dtype(request.array))
        if rank == request.root:
            member.record.bytes_sent += nbytes
        else:
            member.record.bytes_received += nbytes
    if len(group) == 1:
        group[0].advance((yield requests[0]))
        return
    flat = [xp.reshape(r.array, (n,)) for r, n in zip(requests, sizes, strict=True)]
    parts = _cut((yield requests[0]._replace(array=xp.concat(flat))), sizes)
    for member, request, part in zip(group, requests, parts, strict=True):
        member.advance(xp.reshape(part, xp.shape(request.array)))


def _sparse_sum(group: Sequence[Member], rank: int, size: int) -> Round:
    """Join sparse vectors end to end into one."""
    requests: list[SparseSum] = [member.request for member in group]
    bounds = [0, *itertools.accumulate(request.n for request in requests)]
    xp = backend_of(requests[0].sparse.values)
    together = Sparse(
        xp.concat([r.sparse.indices + start for r, start in zip(requests, bounds, strict=False)]),
        xp.concat([r.sparse.values for r in requests]),
    )
    reply: SparseTotal = yield requests[0]._replace(sparse=together, n=bounds[-1])
    dropped = Sparse(xp.to_numpy(reply.dropped.indices), xp.to_numpy(reply.dropped.values))
    totals = _cut(reply.total, [request.n for request in requests])
    for i, (member, total, own) in enumerate(zip(group, totals, cut(dropped, bounds), strict=True)):
        if reply.bytes_sent is not None and reply.bytes_received is not None:
            # One algorithm for all: each has its share by its elements.
            for field, n in (("sent", reply.bytes_sent), ("received", reply.bytes_received)):
                share = divided(n, bounds[-1], bounds[i], bounds[i + 1])
                count = getattr(member.record, f"bytes_{field}") + share
                setattr(member.record, f"bytes_{field}", count)
        like = requests[0].sparse.values
        mine = Sparse(xp.from_numpy(own.indices, like), xp.from_numpy(own.values, like))
        member.advance(SparseTotal(total, mine))


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


_ROUNDS = {
    Joint: _joint,
    SparseSum: _sparse_sum,
    Sum: _reduce,
    Max: _reduce,
    Gather: _gather,
    Alltoall: _alltoall,
    Neighbors: _neighbors,
    Broadcast: _broadcast,
}


def _cut(array: Array, sizes: Sequence[int]) -> list[Array]:
    parts, start = [], 0
    for n in sizes:
        parts.append(array[start : start + n])
        start += n
    return parts


def _packed(xp: Any, payloads: Sequence[Array], open_sizes: Sequence[int]) -> Array:
    """Return one message of all payloads.  Sizes that receivers do not know come first, except the
    last one, which follows from the size of the message."""
    if len(payloads) == 1:
        return payloads[0]
    table = [xp.pack_sizes([payloads[i] for i in open_sizes[:-1]])] if len(open_sizes) > 1 else []
    return xp.concat([*table, *payloads])


def _unpacked(
    xp: Any, message: Array, sizes: Sequence[Any], open_sizes: Sequence[int], sender: int
) -> list[Array]:
    """Return the payloads in a rank's message; those in ``open_sizes`` may have other sizes than on
    this rank."""
    if len(sizes) == 1:
        return [message]
    theirs, start = list(sizes), 0
    if open_sizes:
        # A message that is too short is found to be so below.
        start = LENGTH * (len(open_sizes) - 1)
        table = xp.unpack_sizes(message[:start], len(open_sizes) - 1)
        for i, n in zip(open_sizes[:-1], table, strict=True):
            theirs[i] = n
        theirs[open_sizes[-1]] = 0
        theirs[open_sizes[-1]] = xp.size(message) - start - sum(theirs)
    if not xp.traces and (min(theirs) < 0 or start + sum(theirs) != xp.size(message)):
        raise PayloadError(
            f"the payloads of rank {sender} have sizes that do not fit their message of "
            f"{xp.size(message)} bytes: it was damaged, or the ranks do not run the same version "
            "with the same compression options, or a gradient is sparse on some and dense on "
            "others (sparse_as_dense=True)"
        )
    return _cut(message[start:], theirs)


# -- local work -----------------------------------------------------------------------------------


def answer_batches(members: Sequence[Member]) -> None:
    """Answer ``Batch`` requests until no member has one.  Members must be the same on all ranks, in
    the same order: which arrays are stacked decides the last bits of products."""
    while True:
        alike: dict[Hashable, list[Member]] = {}
        for member in members:
            if isinstance(member.request, Batch):
                alike.setdefault(_look(member.request), []).append(member)
        if not alike:
            return
        for group in alike.values():
            replies = answers([member.request for member in group])
            for member, reply in zip(group, replies, strict=True):
                member.advance(reply)


def answers(requests: Sequence[Batch]) -> list[Array]:
    """Return the answers to requests that differ only in their values."""
    function = requests[0].function
    xp = backend_of(requests[0].arrays[0])
    if len(requests) == 1:
        return [function(xp, *(x[None] for x in requests[0].arrays))[0]]
    columns = zip(*(request.arrays for request in requests), strict=True)
    return xp.unstack(function(xp, *(xp.stack(column) for column in columns)))


def _look(request: Batch) -> Hashable:
    xp = backend_of(request.arrays[0])
    looks = tuple((xp.shape(x), xp.dtype(x), getattr(x, "device", None)) for x in request.arrays)
    return request.function, looks, None if xp.batches else id(request)
