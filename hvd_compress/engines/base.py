"""The base class of engines.

An engine carries out exchanges between ranks, one for each bucket of tensors.  ``start`` submits
the first round of an exchange and never waits for other ranks, so autograd hooks may call it.
``finish`` waits for all results.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator
from typing import Any

from hvd_compress.agreement import Terms
from hvd_compress.base import Array


def asking(request: Any) -> Generator[Any, Any, Any]:
    """The exchange of one request, which returns the reply."""
    return (yield request)


class Engine(abc.ABC):
    """Carries out exchanges, which are generators of requests, and returns their results.

    A subclass has defaults that are right where nothing goes on by itself, and ranks are alike.
    """

    #: making one is a collective, so its owners may compare at once what they are made for
    is_collective: bool = False
    #: every element's sum is made in the order of the ranks, wherever in a bucket it is
    sums_in_rank_order: bool = True
    #: arrays of a GPU are sent from its memory, and arrive there
    reads_device: bool = False

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...

    @property
    @abc.abstractmethod
    def size(self) -> int: ...

    @abc.abstractmethod
    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        """Submit the first round of an exchange.

        ``name`` is unique among those in flight.  It is the same on all ranks, as is the order of
        starts.
        """

    def poll(self) -> None:
        """Move on what is in flight, without waiting."""
        return

    @abc.abstractmethod
    def finish(self) -> dict[str, Any]:
        """Wait for everything that was started; what the exchanges return, by name."""

    def run(self, name: str, exchange: Generator[Any, Any, Any]) -> Any:
        """Carry out an exchange while nothing else is in flight, and return what it returns."""
        self.start(name, exchange)
        return self.finish()[name]

    @abc.abstractmethod
    def abandon(self) -> None:
        """Forget what is in flight, after a failure: exchanges are closed, and put back what they
        have changed already."""

    def agree(self, terms: Terms, like: Array, at_once: bool = False) -> None:
        """Begin to compare ``terms`` over the ranks, before the first ``start`` of a step;
        ``finish`` raises ``MismatchError`` before anything else if they differ.

        Args:
            like: one of the arrays that will be exchanged.
            at_once: that of this step does; else an engine may wait until that of the next one.
                The same on all ranks.
        """
        return

    def compare(self) -> None:
        """Wait for the comparison that :meth:`agree` has begun, before anything else.  Raise
        ``MismatchError``, or leave it to :meth:`finish` if it may wait until nothing is in flight.
        """
        return

    def check_step(self, describe: Callable[[], list[str]], planned: bool, like: Array) -> None:
        """Raise ``MismatchError`` if the ranks are known to describe this step's tensors in
        different words; engines that cannot wait for each other do nothing.

        Args:
            describe: returns a text for each tensor.
            planned: the ranks know which tensors make a bucket.
            like: as in :meth:`agree`.
        """
        return
