"""The contract between requests and engines."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, cast

from hvd_compress.backends import Array, Output
from hvd_compress.errors import CompressionError

#: bytes of a message's length, where it is sent along
LENGTH = 8


class Request(abc.ABC):
    """A request that an exchange yields, for an engine to answer.

    >>> isinstance(Sum(np.ones(3)), Request), Sum(np.ones(3)).describe()
    (True, 'sum of 3 float64')
    """

    #: the fields that are equal in requests that can be joined
    shared: ClassVar[tuple[str, ...]] = ()

    @property
    def kind(self) -> Hashable:
        """The base of requests that can be joined."""
        return type(self), *[getattr(self, name) for name in self.shared]

    @abc.abstractmethod
    def describe(self) -> str:
        """Return what must be the same on all ranks, as text."""


class Collective(Request):
    """A request that needs an answer from other ranks.

    Requests of one kind for the tensors of a bucket are carried as one.  ``join`` makes that one,
    and ``cut`` cuts its reply into a reply to each.

    >>> requests = [Sum(np.ones(2)), Sum(np.zeros(3))]
    >>> joined = Sum.join(requests)
    >>> joined.array, joined.nbytes
    (array([1., 1., 0., 0., 0.]), 40)
    >>> Sum.cut(requests, reply=2 * joined.array, rank=0)
    [array([2., 2.]), array([0., 0., 0.])]
    """

    #: the reply is the same on all ranks
    is_common: ClassVar[bool] = True
    #: the field of the array that is sent, where it is one
    sends: ClassVar[str]

    # -- its bytes -----------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def nbytes(self) -> Any:
        """The bytes that a rank hands over, the length of a message of any size included; 0 where
        only the reply shows it."""

    @abc.abstractmethod
    def count(self, reply: Any, rank: int, size: int) -> tuple[Any, Any]:
        """Return the bytes that ``rank`` of ``size`` has sent in addition to ``nbytes``, and those
        that it has received, given the reply to the request."""

    # -- several as one ------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def join(cls, requests: Sequence[Any]) -> Any:
        """Return one request for several of one kind."""

    @classmethod
    @abc.abstractmethod
    def cut(cls, requests: Sequence[Any], reply: Any, rank: int) -> list[Any]:
        """Return the replies to requests that were joined; ``reply`` is that of the joined one."""

    # -- what it means -------------------------------------------------------------------------

    @classmethod
    @abc.abstractmethod
    def reply(cls, requests: Sequence[Any], rank: int) -> Any:
        """Return the reply that ``rank`` gets, given all ranks' requests in rank order.  This is
        the definition of a kind of request.

        Raises:
            CompressionError: the ranks' requests do not fit each other.
        """

    # -- arrays in, arrays out -----------------------------------------------------------------

    @property
    def arrays(self) -> Sequence[Array]:
        """The arrays that are sent."""
        return [getattr(self, self.sends)]

    def carrying(self, arrays: Sequence[Array]) -> Any:
        """Return the same request with other arrays, which somebody may need afterwards."""
        return dataclasses.replace(cast(Any, self), **{self.sends: arrays[0]})

    @abc.abstractmethod
    def outputs(self, rank: int, size: int) -> Output | list[Output]:
        """Return dtype and shape of the reply, or of each of its arrays, if they are known in
        advance, as a graph wants them."""


def require_alike(what: str, looks: Sequence[Hashable]) -> None:
    """Raise ``CompressionError`` unless all ranks have the same."""
    if len(set(looks)) > 1:
        raise CompressionError(f"{what}: {sorted(set(looks), key=str)}")


def cut_at(array: Array, sizes: Sequence[Any]) -> list[Array]:
    """Return the parts of a flat array, of the given sizes."""
    parts, start = [], 0
    for n in sizes:
        parts.append(array[start : start + n])
        start += n
    return parts
