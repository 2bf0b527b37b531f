"""The base class of engines.

An engine carries out exchanges between ranks, one for each bucket of tensors.  ``start`` submits
the first round of an exchange and never waits for other ranks, so it may be called from autograd
hooks; ``finish`` waits for all results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np

from hvd_compress.agreement import Terms
from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Alltoall,
    Array,
    Broadcast,
    Collective,
    Gather,
    Joint,
    Local,
    Neighbors,
    Request,
    SparseSum,
    Sum,
)

#: bytes of a message's length, where it is sent along
LENGTH = 8


class Engine(Protocol):
    """Carries out exchanges, which are generators of requests, and returns their results."""

    #: making one is a collective, so its owners may compare at once what they are made for
    is_collective: bool
    #: every element's sum is made in the order of the ranks, wherever in a bucket it is
    sums_in_rank_order: bool

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        """Submit the first round of an exchange; ``name`` is unique among those in flight, and the
        same on all ranks, as is the order of starts."""

    def poll(self) -> None:
        """Move on what is in flight, without waiting."""

    def finish(self) -> dict[str, Any]:
        """Wait for everything that was started; what the exchanges return, by name."""

    def abandon(self) -> None:
        """Forget what is in flight, after a failure."""

    def agree(self, terms: Terms, like: Array) -> None:
        """Begin to compare ``terms`` over the ranks, before the first ``start`` of a step;
        ``finish`` raises ``MismatchError`` before anything else if they differ.  ``like`` is one of
        the arrays that will be exchanged."""

    def check_step(self, describe: Callable[[], list[str]], planned: bool, like: Array) -> None:
        """Raise ``MismatchError`` if the ranks are known to describe this step's tensors in
        different words; engines that cannot wait for each other do nothing.

        Args:
            describe: returns a text for each tensor.
            planned: the ranks know which tensors make a bucket.
            like: as in :meth:`agree`.
        """


#: what helps when the ranks' tensors differ
SAME_TENSORS = (
    "All ranks must exchange the same tensors in a step. If a gradient is sparse on some ranks and "
    "dense on others, pass sparse_as_dense=True"
)


def itemsize(dtype: str) -> int:
    """Bytes of an element, by NumPy's names and "bfloat16"."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def payload_bytes(request: Collective) -> int:
    """What a rank hands over for a request, the length of a message of any size included."""
    if isinstance(request, Gather):
        size = backend_of(request.payload).size(request.payload)
        return size + (0 if request.equal_sizes else LENGTH)
    if isinstance(request, Neighbors):
        size = backend_of(request.payload).size(request.payload)
        return len(request.targets) * (size + (0 if request.equal_sizes else LENGTH))
    if isinstance(request, Alltoall):
        size = sum(backend_of(payload).size(payload) for payload in request.payloads)
        return size + (0 if request.equal_sizes else LENGTH * len(request.payloads))
    if isinstance(request, SparseSum | Broadcast):  # the former's algorithm and the latter's root
        return 0  # are counted with the reply
    xp = backend_of(request.array)
    wire = (isinstance(request, Sum) and request.wire) or xp.dtype(request.array)
    return xp.size(request.array) * itemsize(wire)


def watched(
    exchange: Generator[Any, Any, Any], note: Callable[[Collective, Any], None]
) -> Generator[Any, Any, Any]:
    """The exchange of a tensor in a bucket of its own; ``note(request, reply)`` learns of each of
    its collectives."""
    exchange, reply = alone(exchange), None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            return stop.value
        reply = yield request
        if not isinstance(request, Local):
            note(request, reply)


def alone(exchange: Generator[Any, Any, Any]) -> Generator[Request, Any, Any]:
    """The exchange of a tensor that is in a bucket of its own: ``Joint`` requests are run here."""
    reply = None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Joint):
            (reply,) = yield from alone(request.function([request.argument]))
        else:
            reply = yield request
