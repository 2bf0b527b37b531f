"""Carries exchanges over Horovod: asynchronous, every collective named after its parameter.

:class:`FlightEngine` is the part that is not about Horovod; ``ddp.py`` has another one.

A *flight* is one exchange, or the exchanges of a group of parameters, on its way.  ``start``
submits the first round of a flight and never waits, so it may be called from autograd hooks, in
whatever order gradients become ready.  ``finish`` brings all flights in: it waits for each in turn
and submits its next round before it turns to the following one.  Since every rank has submitted a
round of all flights before it waits for any, ranks may wait in different orders without deadlock.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch

from hvd_compress.base import Exchange, Gather, Max, Outcome, Request
from hvd_compress.engines import LENGTH, payload_bytes
from hvd_compress.errors import PayloadError
from hvd_compress.stats import Record


class _Op(NamedTuple):
    """One Horovod collective; equal ``kind`` and dtype may travel as one grouped operation."""

    kind: str
    name: str
    tensor: torch.Tensor
    splits: torch.Tensor | None = None


@dataclasses.dataclass(eq=False)
class _Traveller:
    """One exchange: ``steps`` yields collectives and returns the outcome."""

    name: str
    steps: Generator[_Op, Any, Outcome]
    op: _Op | None = None
    outcome: Outcome | None = None

    def advance(self, result: Any) -> None:
        try:
            self.op = self.steps.send(result)
        except StopIteration as stop:
            self.op, self.outcome = None, stop.value


@dataclasses.dataclass(eq=False)
class _Flight:
    travellers: list[_Traveller]
    waiting: list[tuple[int, list[_Traveller]]] = dataclasses.field(default_factory=list)


class FlightEngine(abc.ABC):
    """Flights over the ranks of a library's collectives."""

    def __init__(self) -> None:
        self._flights: list[_Flight] = []

    @property
    @abc.abstractmethod
    def rank(self) -> int: ...

    @property
    @abc.abstractmethod
    def size(self) -> int: ...

    @abc.abstractmethod
    def _launch(self, kind: str, ops: Sequence[_Op]) -> Any:
        """Submit operations of one kind and dtype; a handle."""

    @abc.abstractmethod
    def _wait(self, handle: Any, count: int) -> list[Any]:
        """Results of the ``count`` operations behind a handle."""

    def agree(self, text: str) -> None:
        """Differing options show when frames are decoded, without a message more."""
        del text

    def start(self, exchanges: dict[str, tuple[Exchange, Record]]) -> None:
        """Submit the first round of one exchange by name, or of a group that travels together."""
        flight = _Flight(
            [
                _Traveller(name, self._steps(name, exchange, record))
                for name, (exchange, record) in exchanges.items()
            ]
        )
        self._flights.append(flight)
        for traveller in flight.travellers:
            traveller.advance(None)
        self._submit(flight)

    def finish(self) -> dict[str, Outcome]:
        """Outcomes by name of everything that was started."""
        flights = self._flights
        while any(flight.waiting for flight in flights):
            for flight in flights:
                waiting, flight.waiting = flight.waiting, []
                for handle, travellers in waiting:
                    for traveller, own in zip(
                        travellers, self._wait(handle, len(travellers)), strict=True
                    ):
                        traveller.advance(own)
                self._submit(flight)
        self._flights = []
        return {t.name: t.outcome for flight in flights for t in flight.travellers if t.outcome}

    def abandon(self) -> None:
        """Forget what is under way, after a failure of the collectives themselves."""
        self._flights = []

    def _submit(self, flight: _Flight) -> None:
        buckets: dict[Any, list[_Traveller]] = {}
        for traveller in flight.travellers:
            if (op := traveller.op) is not None:
                single = traveller.name if op.kind == "alltoall" else None
                buckets.setdefault((op.kind, op.tensor.dtype, single), []).append(traveller)
        for (kind, _, _), travellers in buckets.items():
            handle = self._launch(kind, [t.op for t in travellers if t.op is not None])
            flight.waiting.append((handle, travellers))

    def _steps(self, name: str, exchange: Exchange, record: Record) -> Generator[_Op, Any, Outcome]:
        """Requests become collectives named ``hvd_compress.PARAMETER.ROUND``."""
        reply, number = None, 0
        while True:
            try:
                request = exchange.send(reply)
            except StopIteration as stop:
                return stop.value
            reply = yield from self._carry(request, f"hvd_compress.{name}.{number}", record)
            number += 1

    def _carry(self, request: Request, name: str, record: Record) -> Generator[_Op, Any, Any]:
        sent = payload_bytes(request)
        record.bytes_sent += sent
        if isinstance(request, Gather):
            parts = yield from self._gather(request, name)
            lengths = 0 if request.equal_sizes else LENGTH * self.size
            record.bytes_received += sum(part.numel() for part in parts) + lengths - sent
            return parts
        record.bytes_received += sent
        array = request.array
        if array.numel() == 0:
            return array
        if isinstance(request, Max):
            return (yield _Op("max", name, array))
        if request.wire == "bfloat16":
            return (yield from self._sum_bfloat16(array, name))
        if request.wire is not None:
            total = yield _Op("sum", name, array.to(getattr(torch, request.wire)))
            return total.to(array.dtype)
        return (yield _Op("sum", name, array))

    def _gather(self, request: Gather, name: str) -> Generator[_Op, Any, list[torch.Tensor]]:
        payload = request.payload
        if request.equal_sizes:
            # Other sizes show when the frames are decoded.
            everything = yield _Op("gather_equal", name, payload)
            return list(torch.tensor_split(everything, self.size))
        length = torch.tensor([payload.numel()], dtype=torch.int64).view(torch.uint8)
        everything = yield _Op("gather", name, torch.cat([length.to(payload.device), payload]))
        return _split_by_length(everything, self.size)

    def _sum_bfloat16(self, array: torch.Tensor, name: str) -> Generator[_Op, Any, torch.Tensor]:
        total = yield _Op("sum", name, array.bfloat16())
        return total.to(array.dtype)


class HorovodEngine(FlightEngine):
    """Flights over one process set.

    Args:
        hvd: the module ``horovod.torch``.
        process_set: the ranks that take part; this rank must be one of them.
        predivide: sums are scaled by 1 / predivide before and by predivide after adding.
    """

    def __init__(self, hvd: Any, process_set: Any, predivide: float = 1.0) -> None:
        super().__init__()
        self._hvd = hvd
        self._set = process_set
        self._predivide = predivide

    # Elastic training changes both between steps.
    @property
    def rank(self) -> int:
        return self._set.rank()

    @property
    def size(self) -> int:
        return self._set.size()

    def _launch(self, kind: str, ops: Sequence[_Op]) -> Any:
        hvd, name, common = self._hvd, ops[0].name, {"process_set": self._set}
        if kind == "alltoall":
            return hvd.alltoall_async(ops[0].tensor, ops[0].splits, name=name, **common)
        if kind == "sum":
            common |= {"op": hvd.Sum}
            if self._predivide != 1:
                common |= {
                    "prescale_factor": 1 / self._predivide,
                    "postscale_factor": self._predivide,
                }
        elif kind == "max":
            common |= {"op": hvd.Max}
        verb = "allgather_async" if kind.startswith("gather") else "allreduce_async"
        if len(ops) > 1:
            return getattr(hvd, f"grouped_{verb}")([op.tensor for op in ops], name=name, **common)
        return getattr(hvd, verb)(ops[0].tensor, name=name, **common)

    def _wait(self, handle: Any, count: int) -> list[Any]:
        result = self._hvd.synchronize(handle)
        return list(result) if count > 1 else [result]

    def _sum_bfloat16(self, array: torch.Tensor, name: str) -> Generator[_Op, Any, torch.Tensor]:
        """Horovod cannot add bfloat16, but it can carry its bits: every rank adds one part, in
        float32, and gives the rounded sum to all.  Moves as many bytes as a ring."""
        size, parts = self.size, torch.tensor_split(array.bfloat16().view(torch.int16), self.size)
        splits = torch.tensor([part.numel() for part in parts], dtype=torch.int32)
        # Horovod returns what arrived and how much of it came from whom.
        mine = yield _Op("alltoall", f"{name}.scatter", torch.cat(parts), splits)
        summed = mine[0].view(torch.bfloat16).view(size, -1).float().sum(0)
        total = yield _Op("gather", f"{name}.gather", summed.bfloat16().view(torch.int16))
        return total.view(torch.bfloat16).to(array.dtype)


def _split_by_length(everything: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Undo the concatenation of messages that start with their length (int64)."""
    parts, start = [], 0
    for rank in range(size):
        head = everything[start : start + LENGTH]
        length = int.from_bytes(bytes(head.tolist()), "little", signed=True)
        start += LENGTH
        if head.numel() != LENGTH or not 0 <= length <= everything.numel() - start:
            raise PayloadError(
                f"the message of rank {rank} starts with a length of {length}, which cannot be: it "
                "was damaged, or the parameter's gradient is sparse on some ranks and dense on "
                "others; pass sparse_as_dense=True to hvd.DistributedOptimizer then"
            )
        parts.append(everything[start : start + length])
        start += length
    return parts
