"""The engine over mpi4py.

Exchanges start in the same order on all ranks, and each round has its own tags.  An exchange whose
round is complete starts its next round at once, without waiting for other exchanges.

Sums are added in the order of the ranks and half precisions in float32: results are those of the
lockstep world, bit for bit.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.agreement import Terms, agreement
from hvd_compress.base import Array
from hvd_compress.engines.base import SAME_TENSORS, Comparing
from hvd_compress.errors import MismatchError
from hvd_compress.mpi.carriers import carry
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.progress import Algorithm, Work, wait_for

#: tags of one exchange, and of one of its rounds; a round opens fewer channels than it has tags
_TAGS, _ROUND = 1024, 256
#: seconds between two looks at what is in flight, which bindings ask for after every layer
_PAUSE = 1e-4


class MpiEngine(Comparing):
    """Carries out exchanges over a communicator.  Making one duplicates the communicator, which is
    a collective; :meth:`close` frees the duplicate, as the making of another one does after all
    ranks have dropped this.

    Args:
        comm: ``None`` for all ranks.
        predivide: arrays are divided by it before they are added, and sums multiplied by it.

    >>> engine = MpiEngine(MPI.COMM_SELF)
    >>> engine.rank, engine.size
    (0, 1)
    >>> engine.close()
    """

    is_collective = True
    sums_in_rank_order = True

    def __init__(
        self, comm: MPI.Comm | Communicator | None = None, *, predivide: float = 1.0
    ) -> None:
        self.comm = Communicator.of(comm).duplicate("a new optimizer, reducer or engine")
        self.predivide = predivide
        self._agreement: Work | None = None
        self._in_flight: dict[str, Work] = {}
        self._started = 0  # exchanges ever
        self._polled = 0.0  # when

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def agree(self, terms: Terms, like: Array) -> None:
        self.comm.check()
        # In host memory, wherever the gradients are.
        self._agreement = self._launch("agreement", agreement(terms, np.empty(0)))

    def check_step(self, describe: Callable[[], list[str]], planned: bool, like: Array) -> None:
        """Compare the ranks, for as many steps as the communicator checks calls."""
        self._bring_in_agreement()
        if not self.comm.checks:
            return
        try:
            self.comm.agree(f"exchange of {', '.join(describe())}")
        except MismatchError as error:
            raise MismatchError(f"{error}\n{SAME_TENSORS}") from None

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        self.comm.check()
        self._in_flight[name] = self._launch(name, exchange)

    def poll(self) -> None:
        if self._in_flight and (now := time.perf_counter()) > self._polled + _PAUSE:
            self._polled = now
            for each in self._in_flight.values():
                each.poll()

    def finish(self) -> dict[str, Any]:
        self.comm.check()
        self._bring_in_agreement()
        wait_for(self.comm, list(self._in_flight.values()))
        done, self._in_flight = self._in_flight, {}
        self._raise_late()
        return {name: each.results[0] for name, each in done.items()}

    def _bring_in_agreement(self) -> None:
        comparison, self._agreement = self._agreement, None
        if comparison is not None:
            wait_for(self.comm, [comparison])
            self._note(comparison.results[0])

    def abandon(self) -> None:
        """Discard everything in flight.  Other ranks may go on with the step, and their messages
        must not be taken for later ones: if gradients have been sent, this engine cannot be used
        again.  The comparison of the ranks has its own tags, and completes by itself."""
        left = list(self._in_flight.values())
        self._agreement, self._in_flight, self._late = None, {}, None
        if left:
            self.comm.give_up("a step was abandoned in the middle", left)
        for each in left:
            each.close()

    def close(self) -> None:
        """Free the duplicate of the communicator; this is a collective."""
        self.comm.free()

    def _launch(self, name: str, exchange: Generator[Any, Any, Any]) -> Work:
        # Tags are used again after a while: whoever had them must be done by then.
        generations = self.comm.tags // 2 // _TAGS
        under_way = [*([self._agreement] if self._agreement else []), *self._in_flight.values()]
        if len(under_way) >= generations:
            wait_for(self.comm, under_way[: len(under_way) - generations + 1])
        tag = self.comm.tags // 2 + self._started % generations * _TAGS
        self._started += 1
        # As a work it moves, and reports damage, whatever is waited for.
        return Work(self.comm, "exchange of gradients", [self._rounds(name, exchange, tag)])

    def _rounds(self, name: str, exchange: Generator[Any, Any, Any], tag: int) -> Algorithm:
        """Carry out the rounds of an exchange one after the other, and return its result."""
        with contextlib.closing(exchange):
            reply = None
            for number in itertools.count():
                try:
                    request = exchange.send(reply)
                except StopIteration as stop:
                    return stop.value
                at = tag + number % (_TAGS // _ROUND) * _ROUND
                work, reply_of = carry(request, self.comm, at, self.predivide)
                work.note = f", with {name}"
                if not work.is_over:
                    yield work
                reply = reply_of()
