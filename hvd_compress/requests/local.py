"""Requests for many tensors at once, which engines answer themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

from hvd_compress.backends import Array, backend_of
from hvd_compress.requests.base import Request


@dataclasses.dataclass(eq=False)
class Batch(Request):
    """Apply a function to arrays, together with all other tensors that request the same function
    with equal shapes.  ``function(xp, *stacks)`` gets the arrays stacked along a new first
    dimension, and its result must have this dimension too.  The reply is this tensor's part of the
    result.  This replaces many small operations of linear algebra by a few large ones.

    >>> def product(xp, a, b):
    ...     return xp.matmul(a, b)
    >>> pair = [Batch(product, (i * np.eye(2), np.ones((2, 1)))) for i in (1, 2)]
    >>> [answer.tolist() for answer in Batch.answers(pair)]
    [[[1.0], [1.0]], [[2.0], [2.0]]]
    """

    function: Callable[..., Array]
    arrays: tuple[Array, ...]

    def describe(self) -> str:
        return "local work"

    @staticmethod
    def answers(requests: Sequence[Batch]) -> list[Array]:
        """Return the replies, in order.  The requests must be the same on all ranks: which arrays
        are stacked decides the last bits of products."""
        alike: dict[Hashable, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(request._look(), []).append(i)
        found: dict[int, Array] = {}
        for places in alike.values():
            stacked = _stacked([requests[i] for i in places])
            found.update(zip(places, stacked, strict=True))
        return [found[i] for i in range(len(requests))]

    def _look(self) -> Hashable:
        xp = backend_of(self.arrays[0])
        looks = tuple((xp.shape(x), xp.dtype(x), getattr(x, "device", None)) for x in self.arrays)
        return self.function, looks, None if xp.batches else id(self)


def _stacked(requests: Sequence[Batch]) -> list[Array]:
    """Return the answers to requests that differ only in their values."""
    function = requests[0].function
    xp = backend_of(requests[0].arrays[0])
    if len(requests) == 1:
        return [function(xp, *(x[None] for x in requests[0].arrays))[0]]
    columns = zip(*(request.arrays for request in requests), strict=True)
    return xp.unstack(function(xp, *(xp.stack(column) for column in columns)))


@dataclasses.dataclass(eq=False)
class Joint(Request):
    """Run one exchange for all tensors of the model that request the same ``function``: they belong
    into one bucket, whatever its size.

    ``function(arguments)`` gets the ``argument`` of each of them, in an order that is the same on
    all ranks.  It is a generator of requests, and returns a list of replies in that order.

    Attributes:
        weight: the bytes of the common messages are counted to the tensors in proportion to it.
        key: tensors that differ in it have exchanges of their own, for instance their dtype.

    >>> def together(arrays):
    ...     total = yield Sum(np.concatenate(arrays))
    ...     return np.split(total, np.cumsum([x.size for x in arrays])[:-1])
    >>> requests = [Joint(together, np.ones(2)), Joint(together, np.zeros(1))]
    >>> next(together([request.argument for request in requests])).array
    array([1., 1., 0.])
    """

    function: Callable[[list[Any]], Generator[Any, Any, list[Any]]]
    argument: Any
    weight: int = 1
    key: Hashable = None

    shared = ("function", "key")

    def describe(self) -> str:
        return f"joint work of weight {self.weight}"
