"""How ranks meet: a sum of everything, or an allgather of messages."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from hvd_compress.backends import backend_of
from hvd_compress.base import Array, Coding, Context, Encoded, Sparse, State
from hvd_compress.chain import Aggregated
from hvd_compress.requests import Gather, Request, Sum


def summed(
    x: Array,
    state: State,
    context: Context,
    wire: str | None = None,
    algorithm: str | None = None,
) -> Generator[Request, Any, Aggregated]:
    """Average all elements of the flat ``x``, in a sum; see :class:`hvd_compress.requests.Sum`."""
    xp = backend_of(x)
    total = yield Sum(x, wire, algorithm)
    mean = xp.divided(total, context.size)
    return Aggregated(mean, xp.round_to(x, wire), xp.all_finite(mean), state)


def summed_densely(
    own: Sparse, like: Array, state: State, context: Context
) -> Generator[Request, Any, Aggregated]:
    """Average elements of an array like ``like`` in a sum of all its elements, which moves fewer
    bytes than the messages of many ranks."""
    xp = backend_of(like)
    dense = xp.put(xp.zeros(xp.size(like), like), own.indices, own.values)
    aggregated = yield from summed(dense, state, context)
    return aggregated._replace(sent=own)


def gathered(
    coding: Coding, own: Encoded, like: Array, context: Context
) -> Generator[Request, Any, Aggregated]:
    """Give every rank the messages of all, of arrays like ``like``; each adds them up in the order
    of the ranks."""
    varies = coding.varies(backend_of(like).size(like), context)
    messages = yield Gather(own.message, equal_sizes=not varies)
    total, finite, update = coding.decode(messages, like, context)
    mean = backend_of(like).divided(total, context.size)
    return Aggregated(mean, own.sent, finite, own.state, update)
