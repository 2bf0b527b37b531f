"""The contract of a coding: two functions of arrays that anybody may call.

What a rank sends of a flat array x is ``message, sent, state = coding.encode(x, state, context)``,
and what arrives is ``coding.decode(messages, like, context)``.  Neither talks to a network, and
neither changes an array that it was given.  An aggregator is a coding and a meeting of the ranks: a
sum, an allgather, an all-to-all.  A server, or a transport of one's own, needs the coding alone.

``context`` is the same on both ends, but for the rank: step, seed and name of the tensor, of which
random choices are made, so that they need not be sent.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from hvd_compress.base import Array, Context, Encoded, State
from hvd_compress.config import Configurable

__all__ = ["Coding", "Decoded", "Encoded"]


class Decoded(NamedTuple):
    """The result of ``decode``.

    Attributes:
        total: the sum of what the messages hold, flat, in the dtype of ``like``.
        finite: whether all that they hold is finite: a bool, or a symbol of one.
        update: the direction of the step, if that is not the average of what they hold.

    What does not fit into half precision arrives as Inf:

    >>> coding, x = whole("float16"), np.array([4.0, 1e6])
    >>> coding.decode([coding.encode(x, {}, Context()).message], x, Context())
    Decoded(total=array([ 4., inf]), finite=False, update=None)
    """

    total: Array
    finite: Any
    update: Array | None = None


class Coding(Configurable, abc.ABC, kind="block"):
    """How a flat array (float32 or float64) becomes a message.  Subclasses are frozen dataclasses:
    options are fields.

    >>> coding, x = elements(top_k(0.5)), np.array([4.0, 1.0, 0.0, -2.0])
    >>> message, sent, state = coding.encode(x, coding.init(x), Context())
    >>> message.dtype, coding.decode([message, message], x, Context()).total
    (dtype('uint8'), array([ 8.,  0.,  0., -4.]))
    """

    #: the names of its state, arrays of any size; differs between ranks
    keys: ClassVar[tuple[str, ...]] = ()

    def init(self, x: Array) -> State:
        """Return the state before the first message, of the flat array ``x``."""
        return {}

    @abc.abstractmethod
    def varies(self, n: int, context: Context) -> bool:
        """Return whether messages of ``n`` elements may have different sizes on different ranks."""

    @abc.abstractmethod
    def encode(self, x: Array, state: State, context: Context) -> Encoded:
        """Return the message of the flat ``x``.  Where ``x`` is not finite, receivers must read
        something that is not finite either."""

    @abc.abstractmethod
    def decode(
        self,
        messages: Sequence[Array],
        like: Array,
        context: Context,
        ranks: Sequence[int] | None = None,
    ) -> Decoded:
        """Return the sum of what messages hold, added in their order.

        Args:
            messages: 1-D, uint8.
            like: an array of the size, dtype and device of the one that was encoded.
            ranks: the senders; by default message i is that of rank i.

        Raises:
            PayloadError: a message is damaged, or made with other options than this rank's.
        """
