"""Requests of bytes: payloads are 1-D arrays of uint8.

Several payloads for one receiver become one message.  Sizes that the receiver does not know come
first, except the last one, which follows from the size of the message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvd_compress.backends import Array, Output, backend_of
from hvd_compress.errors import CompressionError, PayloadError
from hvd_compress.requests.base import LENGTH, Collective, cut_at


@dataclasses.dataclass(eq=False)
class Gather(Collective):
    """Send ``payload`` (1-D, uint8) to every rank; the reply is the list of all ranks' payloads.
    ``equal_sizes`` is a promise that all ranks send the same number of bytes, so that engines need
    not exchange sizes.

    >>> ranks = [Gather(np.array([1, 2], np.uint8)), Gather(np.array([3], np.uint8))]
    >>> Gather.reply(ranks, rank=0)
    [array([1, 2], dtype=uint8), array([3], dtype=uint8)]
    """

    payload: Array
    equal_sizes: bool = False

    sends = "payload"

    def describe(self) -> str:
        return f"gather of {_size(self.payload) if self.equal_sizes else 'some'}"

    @property
    def nbytes(self) -> Any:
        return _size(self.payload) + (0 if self.equal_sizes else LENGTH)

    def count(self, reply: Any, rank: int, size: int) -> tuple[Any, Any]:
        if size == 1:
            return 0, 0
        if self.equal_sizes:
            return 0, (size - 1) * self.nbytes
        return 0, sum(map(_size, reply)) + LENGTH * size - self.nbytes

    @classmethod
    def join(cls, requests: Sequence[Any]) -> Any:
        unknown = _unknown(requests)
        return cls(_packed([each.payload for each in requests], unknown), not unknown)

    @classmethod
    def cut(cls, requests: Sequence[Any], reply: Any, rank: int) -> list[Any]:
        sizes, unknown = [_size(each.payload) for each in requests], _unknown(requests)
        parts = [_unpacked(message, sizes, unknown, r) for r, message in enumerate(reply)]
        return [list(column) for column in zip(*parts, strict=True)]

    @classmethod
    def reply(cls, requests: Sequence[Any], rank: int) -> Any:
        return [request.payload for request in requests]

    def outputs(self, rank: int, size: int) -> Output | list[Output]:
        return [_form(self.payload, self.equal_sizes)] * size


@dataclasses.dataclass(eq=False)
class Alltoall(Collective):
    """Send one of ``payloads`` (1-D, uint8) to each rank.  The reply holds the payload that each
    rank has for this one; both are in rank order.

    ``equal_sizes`` is a promise that all ranks have equally many bytes for the same rank.  Engines
    need not exchange sizes then.

    >>> ranks = [Alltoall([np.array([10 * i + j], np.uint8) for j in range(2)]) for i in range(2)]
    >>> Alltoall.reply(ranks, rank=1)
    [array([1], dtype=uint8), array([11], dtype=uint8)]
    """

    payloads: Sequence[Array]
    equal_sizes: bool = True

    is_common = False
    shared = ("equal_sizes",)

    def describe(self) -> str:
        return f"alltoall of {list(map(_size, self.payloads)) if self.equal_sizes else 'some'}"

    @property
    def nbytes(self) -> Any:
        lengths = 0 if self.equal_sizes else LENGTH * len(self.payloads)
        return sum(map(_size, self.payloads)) + lengths

    def count(self, reply: Any, rank: int, size: int) -> tuple[Any, Any]:
        own = _size(self.payloads[rank])
        if self.equal_sizes:  # all have as many bytes for this rank
            return 0, (size - 1) * own
        return 0, sum(map(_size, reply)) - own + LENGTH * (size - 1)

    @classmethod
    def join(cls, requests: Sequence[Any]) -> Any:
        unknown, columns = _unknown(requests), zip(*(x.payloads for x in requests), strict=True)
        return cls([_packed(column, unknown) for column in columns], requests[0].equal_sizes)

    @classmethod
    def cut(cls, requests: Sequence[Any], reply: Any, rank: int) -> list[Any]:
        # Of equal sizes, all ranks have as many bytes for this one as it has for itself.
        sizes, unknown = [_size(each.payloads[rank]) for each in requests], _unknown(requests)
        parts = [_unpacked(message, sizes, unknown, r) for r, message in enumerate(reply)]
        return [list(column) for column in zip(*parts, strict=True)]

    @classmethod
    def reply(cls, requests: Sequence[Any], rank: int) -> Any:
        mine = [request.payloads[rank] for request in requests]
        if requests[0].equal_sizes:  # sizes that are open may be symbols of a graph
            sizes = set(map(_size, mine))
            if len(sizes) > 1:
                raise CompressionError(f"payloads for rank {rank} differ in size: {sorted(sizes)}")
        return mine

    @property
    def arrays(self) -> Sequence[Array]:
        return self.payloads

    def carrying(self, arrays: Sequence[Array]) -> Any:
        return dataclasses.replace(self, payloads=arrays)

    def outputs(self, rank: int, size: int) -> Output | list[Output]:
        return [_form(self.payloads[rank], self.equal_sizes)] * size


@dataclasses.dataclass(eq=False)
class Neighbors(Collective):
    """Send ``payload`` (1-D, uint8) to each rank in ``targets``, and receive that of each rank in
    ``sources``.  The reply is the list of the latter, in the order of ``sources``.

    A rank is a target of all its sources, and a source of all its targets; the two may differ, and
    both may be empty.  Tensors of one bucket that request neighbours in the same round have the
    same ones.  ``equal_sizes`` is a promise that the payloads of this rank and of its sources have
    equally many bytes; without it sizes are exchanged first.

    >>> def ring(i):
    ...     return Neighbors(np.array([i], np.uint8), ((i + 1) % 3,), ((i - 1) % 3,))
    >>> Neighbors.reply([ring(i) for i in range(3)], rank=0)
    [array([2], dtype=uint8)]
    """

    payload: Array
    targets: tuple[int, ...]
    sources: tuple[int, ...]
    equal_sizes: bool = True

    is_common = False
    shared = ("targets", "sources", "equal_sizes")
    sends = "payload"

    def describe(self) -> str:
        return f"neighbors of {_size(self.payload) if self.equal_sizes else 'some'}"

    @property
    def nbytes(self) -> Any:
        return len(self.targets) * (_size(self.payload) + (0 if self.equal_sizes else LENGTH))

    def count(self, reply: Any, rank: int, size: int) -> tuple[Any, Any]:
        lengths = 0 if self.equal_sizes else LENGTH * len(reply)
        return 0, sum(map(_size, reply)) + lengths

    @classmethod
    def join(cls, requests: Sequence[Any]) -> Any:
        message = _packed([each.payload for each in requests], _unknown(requests))
        return requests[0].carrying([message])

    @classmethod
    def cut(cls, requests: Sequence[Any], reply: Any, rank: int) -> list[Any]:
        sizes, unknown = [_size(each.payload) for each in requests], _unknown(requests)
        pairs = zip(requests[0].sources, reply, strict=True)
        parts = [_unpacked(message, sizes, unknown, source) for source, message in pairs]
        return [[theirs[i] for theirs in parts] for i in range(len(requests))]

    @classmethod
    def reply(cls, requests: Sequence[Any], rank: int) -> Any:
        own = requests[rank]
        for target in own.targets:
            if target == rank or rank not in requests[target].sources:
                raise CompressionError(
                    f"rank {rank} sends to rank {target}, which does not receive it"
                )
        for source in own.sources:
            theirs = requests[source]
            if rank not in theirs.targets:
                raise CompressionError(
                    f"rank {rank} waits for rank {source}, which sends to {theirs.targets}"
                )
            if own.equal_sizes and _size(own.payload) != _size(theirs.payload):
                raise CompressionError(
                    f"rank {rank} has {_size(own.payload)} bytes for its neighbours, and rank "
                    f"{source} {_size(theirs.payload)}"
                )
        return [requests[source].payload for source in own.sources]

    def outputs(self, rank: int, size: int) -> Output | list[Output]:
        return [_form(self.payload, self.equal_sizes)] * len(self.sources)


def _size(payload: Array) -> Any:
    if isinstance(payload, np.ndarray):
        return payload.size
    return backend_of(payload).size(payload)


def _form(payload: Array, equal_sizes: bool) -> Output:
    return "uint8", payload.shape[0] if equal_sizes else None


def _unknown(requests: Sequence[Any]) -> list[int]:
    return [i for i, request in enumerate(requests) if not request.equal_sizes]


def _packed(payloads: Sequence[Array], unknown: Sequence[int]) -> Array:
    """Return one message of all payloads; the sizes of those in ``unknown`` are sent along."""
    if len(payloads) == 1:
        return payloads[0]
    xp = backend_of(payloads[0])
    table = [xp.pack_sizes([payloads[i] for i in unknown[:-1]])] if len(unknown) > 1 else []
    return xp.concat([*table, *payloads])


def _unpacked(
    message: Array, sizes: Sequence[Any], unknown: Sequence[int], sender: int
) -> list[Array]:
    """Return the payloads in a rank's message; those in ``unknown`` may have other sizes than on
    this rank."""
    if len(sizes) == 1:
        return [message]
    xp = backend_of(message)
    theirs, start = list(sizes), 0
    if unknown:
        # A message that is too short is found to be so below.
        start = LENGTH * (len(unknown) - 1)
        table = xp.unpack_sizes(message[:start], len(unknown) - 1)
        for i, n in zip(unknown[:-1], table, strict=True):
            theirs[i] = n
        theirs[unknown[-1]] = 0
        theirs[unknown[-1]] = xp.size(message) - start - sum(theirs)
    if not xp.traces and (min(theirs) < 0 or start + sum(theirs) != xp.size(message)):
        raise PayloadError(
            f"the payloads of rank {sender} have sizes that do not fit their message of "
            f"{xp.size(message)} bytes: it was damaged, or the ranks do not run the same version "
            "with the same compression options; or a gradient is sparse on some and dense on "
            "others (sparse_as_dense=True)"
        )
    return cut_at(message[start:], theirs)
