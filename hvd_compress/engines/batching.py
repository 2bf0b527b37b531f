"""Local work that is done for several tensors at once."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Batch, Outcome


class Traveller:
    """An exchange under way: the ``request`` that it waits for an answer to, or its ``outcome``.

    Args:
        exchange: yields requests, or what an engine makes of them.
    """

    def __init__(self, name: str, exchange: Generator[Any, Any, Outcome]) -> None:
        self.name, self._exchange = name, exchange
        self.request: Any = None
        self.outcome: Outcome | None = None

    def advance(self, reply: Any) -> None:
        """``None`` before the first request."""
        try:
            self.request = self._exchange.send(reply)
        except StopIteration as stop:
            self.request, self.outcome = None, stop.value


def answer_batches(exchanges: Sequence[Traveller]) -> None:
    """Until none of the exchanges asks for a ``Batch`` any more.  They must be the same on all
    ranks, in the same order: what is stacked decides upon the last bits of products."""
    while True:
        alike: dict[Hashable, list[Traveller]] = {}
        for exchange in exchanges:
            if isinstance(exchange.request, Batch):
                alike.setdefault(_look(exchange.request), []).append(exchange)
        if not alike:
            return
        for group in alike.values():
            replies = answers([exchange.request for exchange in group])
            for exchange, reply in zip(group, replies, strict=True):
                exchange.advance(reply)


def answers(requests: Sequence[Batch]) -> list[Array]:
    """Of requests that differ in their values only."""
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
