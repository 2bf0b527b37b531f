"""An engine over a library of collectives that are asynchronous and have names.

A *flight* is one exchange, or the exchanges of a group of parameters, on its way.  ``start``
submits the first round of a flight and never waits, so it may be called from autograd hooks, in
whatever order gradients become ready.  ``finish`` brings all flights in: it waits for each in turn
and submits its next round before it turns to the following one.  Since every rank has submitted a
round of all flights before it waits for any, ranks may wait in different orders without deadlock.

Horovod's engines for PyTorch and TensorFlow are made of this, and that of torch.distributed.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from hvd_compress.agreement import Terms, agreement
from hvd_compress.backends import backend_of
from hvd_compress.base import (
    Alltoall,
    Array,
    Batch,
    Collective,
    Exchange,
    Gather,
    Max,
    Outcome,
    Swap,
)
from hvd_compress.engines.base import LENGTH, payload_bytes
from hvd_compress.engines.batching import Traveller, answer_batches
from hvd_compress.stats import Record


class Op(NamedTuple):
    """One collective: "sum", "max", "gather", "gather_equal", "alltoall" or "swap".  Equal kinds of
    one dtype may travel as one grouped operation, but for the last two, which have ``splits``: how
    many elements of the tensor are for each rank; in a "swap", as many come from it."""

    kind: str
    name: str
    tensor: Array
    splits: Array | None = None


Steps = Generator[Op | Batch, Any, Outcome]


class _Traveller(Traveller):
    """Its requests are collectives, or a ``Batch``."""

    def __init__(self, name: str, steps: Steps, keeps_results: bool) -> None:
        super().__init__(name, steps)
        self.results: list[Any] = []
        self._keeps_results = keeps_results

    def advance(self, reply: Any) -> None:
        if self._keeps_results:
            self.results.append(reply)
        super().advance(reply)


@dataclasses.dataclass(eq=False)
class _Flight:
    travellers: list[_Traveller]
    waiting: list[tuple[int, list[_Traveller]]] = dataclasses.field(default_factory=list)

    @property
    def wants_batches(self) -> bool:
        return any(isinstance(t.request, Batch) for t in self.travellers)


class FlightEngine(abc.ABC):
    """Flights over the ranks of a library's collectives."""

    #: ``_outcome`` wants to know all that arrived, which takes memory until ``finish``
    keeps_results: ClassVar[bool] = False

    is_collective = False
    #: under which ranks compare what they are about to do; unique among what is under way
    agreement_name: str = "agreement"

    def __init__(self) -> None:
        self._agreement: _Flight | None = None
        self._agreed_once = False
        self._flights: list[_Flight] = []

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...

    @property
    @abc.abstractmethod
    def size(self) -> int: ...

    @abc.abstractmethod
    def _launch(self, kind: str, ops: Sequence[Op]) -> Any:
        """Submit operations of one kind and dtype; a handle."""

    @abc.abstractmethod
    def _wait(self, handle: Any, count: int) -> list[Any]:
        """Results of the ``count`` operations behind a handle."""

    def agree(self, terms: Terms, like: Array) -> None:
        """Compare ``terms`` over the ranks, in a flight that comes in before all others.

        The first time it comes in at once: ranks that differ from the start would submit what
        others never will, and nothing can call that back.
        """
        self._agreement = self._depart({self.agreement_name: (agreement(terms, like), Record())})
        if not self._agreed_once:
            self._bring_in_agreement()
            self._agreed_once = True

    def start(self, exchanges: Mapping[str, tuple[Exchange, Record]]) -> None:
        """Submit the first round of one exchange by name, or of a group that travels together."""
        self._flights.append(self._depart(exchanges))

    def _depart(self, exchanges: Mapping[str, tuple[Exchange, Record]]) -> _Flight:
        flight = _Flight(
            [
                _Traveller(name, self._steps(name, exchange, record), self.keeps_results)
                for name, (exchange, record) in exchanges.items()
            ]
        )
        for traveller in flight.travellers:
            traveller.advance(None)
        answer_batches(flight.travellers)
        self._submit(flight)
        return flight

    def finish(self) -> dict[str, Outcome]:
        """Outcomes by name of everything that was started."""
        self._bring_in_agreement()
        flights = self._flights
        self._bring_in(flights)
        self._flights = []
        travellers = [t for flight in flights for t in flight.travellers]
        return {t.name: self._outcome(t.outcome, t.results) for t in travellers if t.outcome}

    def _bring_in_agreement(self) -> None:
        flight, self._agreement = self._agreement, None
        if flight is not None:
            self._bring_in([flight])

    def _bring_in(self, flights: Sequence[_Flight]) -> None:
        while any(flight.waiting for flight in flights):
            for flight in flights:
                waiting, flight.waiting = flight.waiting, []
                for handle, travellers in waiting:
                    for traveller, own in zip(
                        travellers, self._wait(handle, len(travellers)), strict=True
                    ):
                        traveller.advance(own)
                if not flight.wants_batches:
                    self._submit(flight)
            # All flights are there, and have a round behind them: the same on all ranks.
            late = [flight for flight in flights if flight.wants_batches]
            travellers = [t for flight in late for t in flight.travellers]
            travellers.sort(key=lambda t: t.name)
            answer_batches(travellers)
            for flight in late:
                self._submit(flight)

    def _outcome(self, outcome: Outcome, results: list[Any]) -> Outcome:
        """For libraries that would leave out a collective whose result the exchange ignores."""
        return outcome

    def abandon(self) -> None:
        """Forget what is under way, after a failure of the collectives themselves."""
        self._agreement, self._flights = None, []

    def _submit(self, flight: _Flight) -> None:
        buckets: dict[Any, list[_Traveller]] = {}
        for traveller in flight.travellers:
            if isinstance(op := traveller.request, Op):
                single = None if op.splits is None else traveller.name
                buckets.setdefault((op.kind, op.tensor.dtype, single), []).append(traveller)
        for (kind, _, _), travellers in buckets.items():
            ops = [t.request for t in travellers if isinstance(t.request, Op)]
            handle = self._launch(kind, ops)
            flight.waiting.append((handle, travellers))

    def _steps(self, name: str, exchange: Exchange, record: Record) -> Steps:
        """Requests become collectives named ``hvd_compress.PARAMETER.ROUND``."""
        reply, number = None, 0
        while True:
            try:
                request = exchange.send(reply)
            except StopIteration as stop:
                return stop.value
            if isinstance(request, Batch):
                reply = yield request
                continue
            reply = yield from self._carry(request, f"hvd_compress.{name}.{number}", record)
            number += 1

    def _carry(self, request: Collective, name: str, record: Record) -> Generator[Op, Any, Any]:
        sent = payload_bytes(request)
        record.bytes_sent += sent
        if isinstance(request, Gather):
            parts = yield from self._gather(request, name)
            lengths = 0 if request.equal_sizes else LENGTH * self.size
            received = sum(backend_of(part).size(part) for part in parts)
            record.bytes_received += received + lengths - sent
            return parts
        if isinstance(request, Alltoall):
            mine = request.payloads[self.rank]
            parts = yield from self._alltoall(request.payloads, name)
            own = backend_of(mine).size(mine)
            record.bytes_received += own * (self.size - 1)
            return parts
        record.bytes_received += sent
        if isinstance(request, Swap):
            return (yield from self._swap(request, name))
        array, xp = request.array, backend_of(request.array)
        if xp.size(array) == 0:
            return array
        if isinstance(request, Max):
            return (yield Op("max", name, array))
        if request.wire is None:
            return (yield Op("sum", name, array))
        in_bfloat16 = request.wire == "bfloat16"
        add = self._sum_bfloat16 if in_bfloat16 else self._sum
        total = yield from add(xp.cast(array, request.wire), name)
        return xp.cast(total, xp.dtype(array))

    def _gather(self, request: Gather, name: str) -> Generator[Op, Any, list[Array]]:
        if request.equal_sizes:
            return self._split(request.payload, (yield Op("gather_equal", name, request.payload)))
        message = self._with_length(request.payload)
        return self._split_by_length((yield Op("gather", name, message)))

    def _alltoall(self, payloads: list[Array], name: str) -> Generator[Op, Any, list[Array]]:
        xp, mine = backend_of(payloads[0]), payloads[self.rank]
        splits = self._splits([xp.size(payload) for payload in payloads])
        # What arrived, and how much of it came from whom.
        everything, _ = yield Op("alltoall", name, xp.concat(payloads), splits)
        return self._split(mine, everything)

    def _swap(self, request: Swap, name: str) -> Generator[Op, Any, Array]:
        xp, partner = backend_of(request.payload), request.partner
        payload = request.payload[:0] if partner is None else request.payload
        size = xp.size(payload)
        splits = self._splits([size if rank == partner else 0 for rank in range(self.size)])
        theirs, _ = yield Op("swap", name, payload, splits)
        return xp.reshape(theirs, (size,))

    @abc.abstractmethod
    def _splits(self, sizes: Sequence[int]) -> Array:
        """As the library's all-to-all wants them."""

    @abc.abstractmethod
    def _split(self, own: Array, everything: Array) -> list[Array]:
        """All ranks' payloads, which have the size of this rank's ``own``."""

    @abc.abstractmethod
    def _with_length(self, payload: Array) -> Array:
        """A message that starts with its length, 8 bytes."""

    @abc.abstractmethod
    def _split_by_length(self, everything: Array) -> list[Array]:
        """Undo the concatenation of all ranks' messages."""

    def _sum(self, array: Array, name: str) -> Generator[Op, Any, Array]:
        return (yield Op("sum", name, array))

    def _sum_bfloat16(self, array: Array, name: str) -> Generator[Op, Any, Array]:
        """For libraries that cannot add bfloat16."""
        return (yield Op("sum", name, array))


class ProcessSetEngine(FlightEngine):
    """Flights over one process set of Horovod's.

    Args:
        process_set: the ranks that take part; this rank must be one of them.
        predivide: sums are scaled by 1 / predivide before and by predivide after adding.
    """

    def __init__(self, process_set: Any, predivide: float = 1.0) -> None:
        super().__init__()
        self._set = process_set
        scales = {"prescale_factor": 1 / predivide, "postscale_factor": predivide}
        self._scales = scales if predivide != 1 else {}

    # Elastic training changes both between steps.
    @property
    def rank(self) -> int:
        return self._set.rank()

    @property
    def size(self) -> int:
        return self._set.size()
