"""Carries exchanges over mpi4py, in buckets that leave while backward goes on.

``start`` runs an exchange up to its first request, which is where the compression is done, and
puts it into its bucket; a full bucket leaves at once, all its payloads in a few messages.  Every
further ``start`` also moves on what is on its way.  ``finish`` sends what has not left yet and
waits.  A bucket whose round is over goes on with its next round by itself, so several rounds need
not wait for each other.

Which tensors make a bucket is decided after the first step, from the order in which their
gradients became ready on rank 0.  Buckets leave in the same order on all ranks, each round with
tags of its own, so it does not matter in which order gradients become ready on the others.

Sums are added in the order of the ranks and half precisions in float32: results are those of the
lockstep world, bit for bit, however tensors are put into buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

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
from hvd_compress.errors import ConfigError, MismatchError, PayloadError
from hvd_compress.mpi.dense.allgather import gather
from hvd_compress.mpi.dense.allreduce import CHUNK, start
from hvd_compress.mpi.dense.alltoall import alltoall, swap
from hvd_compress.mpi.dense.direct_allreduce import direct
from hvd_compress.mpi.transport.arrays import Flat
from hvd_compress.mpi.transport.communicator import Channel, Communicator, others
from hvd_compress.mpi.transport.progress import Algorithm, Wait, Work, wait_for
from hvd_compress.mpi.transport.reduction import from_bfloat16, to_bfloat16
from hvd_compress.stats import Record

#: tags of one bucket, and of one of its rounds; a round opens fewer channels than it has tags
_TAGS, _ROUND = 1024, 256
#: a bucket leaves when the gradients in it have that many bytes, uncompressed
BUCKET_BYTES = 8 * 2**20
#: channels that one sum may open
_BLOCKS = 24


class _Traveller(Traveller):
    def __init__(self, name: str, exchange: Exchange, record: Record) -> None:
        super().__init__(name, exchange)
        self.record = record
        self.kind = ""  # of the first request that meets others, for messages
        self.advance(None)

    def advance(self, reply: Any) -> None:
        super().advance(reply)
        if self.request is not None and not isinstance(self.request, Batch):
            self.kind = self.kind or _describe(self.request)
            self.record.bytes_sent += payload_bytes(self.request)


class MpiEngine:
    """Exchanges over a communicator, of which it makes a duplicate: a collective.

    Args:
        comm: ``None`` for all ranks.
        predivide: sums are scaled by 1 / predivide before and by predivide after adding.
        bucket_bytes: a bucket leaves when the gradients in it have that many bytes, uncompressed.
    """

    is_collective = True

    def __init__(
        self,
        comm: MPI.Comm | Communicator | None = None,
        *,
        predivide: float = 1.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes={bucket_bytes}: at least 1")
        self.comm = Communicator.of(comm).duplicate()
        self.predivide = predivide
        self._bucket_bytes = bucket_bytes
        self._plan: list[tuple[str, ...]] = []
        self._agreement: _Flight | None = None
        self._flights: list[_Flight] = []
        self._launched = 0  # flights ever
        self._next = 0  # bucket of the plan
        self._ready: dict[str, _Traveller] = {}  # in the order of their arrival
        self._arrival: list[str] = []

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def agree(self, terms: Terms, like: Array) -> None:
        self.comm.check()
        # In host memory, wherever the gradients are.
        comparison = _Traveller("agreement", agreement(terms, np.empty(0)), Record())
        self._agreement = _Flight(self, [comparison], self._next_tag())

    def start(self, exchanges: Mapping[str, tuple[Exchange, Record]]) -> None:
        self.comm.check()
        for name, (exchange, record) in exchanges.items():
            if name in self._arrival:
                raise ConfigError(f"{name!r} was started twice in one step")
            self._ready[name] = _Traveller(name, exchange, record)
            self._arrival.append(name)
        while self._next < len(self._plan) and self._ready.keys() >= set(self._plan[self._next]):
            self._launch(self._plan[self._next])
            self._next += 1
        self.poll()

    def poll(self) -> None:
        """Move on what is on its way, without waiting."""
        for flight in self._flights:
            flight.poll()

    def finish(self) -> dict[str, Outcome]:
        self.comm.check()
        if self._agreement is not None:
            flight, self._agreement = self._agreement, None
            wait_for(self.comm, [flight])
        names = sorted(self._arrival)
        if self.comm.checks:
            self._agree_on_step(names)
        for bucket in self._plan[self._next :]:  # some of it did not come in this step
            self._launch([name for name in bucket if name in self._ready])
        for bucket in self._buckets(sorted(self._ready)):
            self._launch(bucket)
        wait_for(self.comm, self._flights)
        travellers = [t for flight in self._flights for t in flight.travellers]
        if set(names) != {name for bucket in self._plan for name in bucket}:
            records = {t.name: t.record for t in travellers}
            order = self.comm.run("planning buckets", self._order_of_rank_0(names))[0]
            self._plan = self._buckets([names[i] for i in order], records)
        self._reset()
        return {t.name: t.outcome for t in travellers if t.outcome is not None}

    def _agree_on_step(self, names: Sequence[str]) -> None:
        kinds = {t.name: t.kind for flight in self._flights for t in flight.travellers}
        kinds |= {name: traveller.kind for name, traveller in self._ready.items()}
        text = ", ".join(f"{name} by {kinds[name]}" for name in names)
        try:
            self.comm.agree(f"exchange of {len(names)} tensors: {text}")
        except MismatchError as error:
            raise MismatchError(
                f"{error}\nAll ranks must exchange the same tensors in a step. If a gradient is "
                "sparse on some ranks and dense on others, pass sparse_as_dense=True"
            ) from None

    def abandon(self) -> None:
        """Others may go on with the step, and what they send must never meet what is sent later:
        if gradients have left, this engine cannot be used again.  The comparison of the ranks has
        tags of its own, and comes to its end by itself."""
        flights = self._flights
        self._reset()
        if flights:
            self.comm.give_up("a step was abandoned in the middle", flights)

    def close(self) -> None:
        """Give the duplicate of the communicator back: a collective."""
        self.comm.free()

    def _reset(self) -> None:
        self._agreement, self._flights, self._next = None, [], 0
        self._ready, self._arrival = {}, []

    def _buckets(
        self, names: Sequence[str], records: Mapping[str, Record] | None = None
    ) -> list[tuple[str, ...]]:
        buckets: list[tuple[str, ...]] = []
        bucket: list[str] = []
        size = 0.0
        for name in names:
            record = records[name] if records else self._ready[name].record
            bucket.append(name)
            size += record.dense_bytes / max(record.steps, 1)
            if size >= self._bucket_bytes:
                buckets.append(tuple(bucket))
                bucket, size = [], 0.0
        return [*buckets, tuple(bucket)] if bucket else buckets

    def _order_of_rank_0(self, names: list[str]) -> Algorithm:
        order = np.array([names.index(name) for name in self._arrival], np.int64)
        channel = self.comm.channel()
        if self.rank == 0:
            messages = [channel.send(order, peer) for peer in others(0, self.size)]
        else:
            messages = [channel.receive(order, 0)]
        yield Wait(messages, "order of rank 0")
        return order.tolist()

    def _launch(self, names: Sequence[str]) -> None:
        if not names:
            return
        travellers = [self._ready.pop(name) for name in names]
        self._flights.append(_Flight(self, travellers, self._next_tag()))

    def _next_tag(self) -> int:
        # Tags are used again after a while: whoever had them must be done by then.
        generations = self.comm.tags // 2 // _TAGS
        flights = [*([self._agreement] if self._agreement else []), *self._flights]
        if len(flights) >= generations:
            wait_for(self.comm, flights[: len(flights) - generations + 1])
        tag = self.comm.tags // 2 + self._launched % generations * _TAGS
        self._launched += 1
        return tag


class _Flight:
    """A bucket on its way, one round after the other."""

    call = "exchange of gradients"

    def __init__(self, engine: MpiEngine, travellers: list[_Traveller], tag: int) -> None:
        self.comm, self._predivide = engine.comm, engine.predivide
        self.travellers = travellers
        self._tag, self._round = tag, 0
        self._works: list[tuple[Work, Callable[[], None]]] = []
        self._submit()
        self.comm.under_way.add(self)  # so it moves, and reports damage, whatever is waited for

    @property
    def is_over(self) -> bool:
        return not self._works

    @property
    def is_bulk(self) -> bool:
        return all(work.is_bulk for work, _ in self._works)

    def describe(self) -> str:
        names = [t.name for t in self.travellers]
        work = next((work for work, _ in self._works if not work.is_over), None)
        if work is None:
            return f"waits for nothing, with {names[0]}"
        return f"{work.describe()}, with {names[0]} and {len(names) - 1} other tensors"

    def poll(self) -> bool:
        moved = any([work.poll() for work, _ in self._works])  # noqa: C419, all of them
        while self._works and all(work.is_over for work, _ in self._works):
            moved = True
            works, self._works = self._works, []
            for _, deliver in works:
                deliver()
            self._submit()
        if not self._works:
            self.comm.under_way.discard(self)
        return moved

    def _submit(self) -> None:
        """One round: equal requests travel together."""
        first = self._tag + self._round % (_TAGS // _ROUND) * _ROUND
        tags = itertools.count(first)

        def channel() -> Channel:
            return self.comm.channel(next(tags))

        self._round += 1
        answer_batches(self.travellers)
        groups: dict[Any, list[_Traveller]] = {}
        for traveller in self.travellers:
            request = traveller.request
            if request is not None and not isinstance(request, Batch):
                groups.setdefault(_kind(request), []).append(traveller)
        self._works = [
            _CARRIERS[kind](self, travellers, channel)
            if kind in _CARRIERS
            else self._reduce(kind, travellers, channel)
            for kind, travellers in groups.items()
        ]

    def _reduce(
        self, kind: tuple[str, str], travellers: list[_Traveller], channel: Callable[[], Channel]
    ) -> tuple[Work, Callable[[], None]]:
        op, dtype = kind
        requests: list[Any] = [t.request for t in travellers]
        scale = self._predivide if op == "sum" else 1.0
        parts = [_on_wire(r.array, dtype, scale) for r in requests]
        fused = np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
        flat = Flat(fused, dtype, fused.shape, lambda done: done)
        chunk = max(CHUNK, -(-fused.nbytes // (self.comm.size * _BLOCKS)))
        work = start(
            self.comm, f"{op} of gradients", direct, flat, fused, op, chunk, channel=channel
        )

        def deliver() -> None:
            result = from_bfloat16(fused) if dtype == "bfloat16" else fused
            stops = itertools.accumulate(len(part) for part in parts)
            for traveller, request, part, stop in zip(
                travellers, requests, parts, stops, strict=True
            ):
                xp = backend_of(request.array)
                reply = xp.from_numpy(result[stop - len(part) : stop], request.array)
                reply = xp.cast(reply, xp.dtype(request.array)).reshape(xp.shape(request.array))
                traveller.record.bytes_received += payload_bytes(request)
                traveller.advance(reply * scale if scale != 1 else reply)

        return work, deliver

    def _gather(
        self, travellers: list[_Traveller], channel: Callable[[], Channel]
    ) -> tuple[Work, Callable[[], None]]:
        requests: list[Any] = [t.request for t in travellers]
        payloads = [backend_of(r.payload).to_numpy(r.payload) for r in requests]
        open_sizes = [i for i, r in enumerate(requests) if not r.equal_sizes]
        table = np.array([payloads[i].nbytes for i in open_sizes], "<i8").view(np.uint8)
        message = np.concatenate([table, *payloads])
        work = Work(
            self.comm, "gathering of payloads", [gather(channel(), message, not open_sizes)]
        )

        def deliver() -> None:
            sizes = [payload.nbytes for payload in payloads]
            messages = work.results[0]
            by_rank = [_split(m, sizes, open_sizes, rank) for rank, m in enumerate(messages)]
            for i, (traveller, request) in enumerate(zip(travellers, requests, strict=True)):
                xp = backend_of(request.payload)
                parts = [theirs[i] for theirs in by_rank]
                lengths = 0 if request.equal_sizes else LENGTH * self.comm.size
                received = sum(part.nbytes for part in parts) + lengths
                traveller.record.bytes_received += received - payload_bytes(request)
                traveller.advance([xp.from_numpy(part, request.payload) for part in parts])

        return work, deliver

    def _alltoall(
        self, travellers: list[_Traveller], channel: Callable[[], Channel]
    ) -> tuple[Work, Callable[[], None]]:
        requests: list[Any] = [t.request for t in travellers]
        rows = [[backend_of(p).to_numpy(p) for p in r.payloads] for r in requests]
        messages = [np.concatenate(column) for column in zip(*rows, strict=True)]
        work = Work(self.comm, "all-to-all of payloads", [alltoall(channel(), messages)])

        def deliver() -> None:
            sizes = [row[self.comm.rank].nbytes for row in rows]
            by_rank = [_split(m, sizes, [], rank) for rank, m in enumerate(work.results[0])]
            for i, (traveller, request) in enumerate(zip(travellers, requests, strict=True)):
                traveller.record.bytes_received += sizes[i] * (self.comm.size - 1)
                xp, like = backend_of(request.payloads[0]), request.payloads[0]
                traveller.advance([xp.from_numpy(theirs[i], like) for theirs in by_rank])

        return work, deliver

    def _swap(
        self, travellers: list[_Traveller], channel: Callable[[], Channel]
    ) -> tuple[Work, Callable[[], None]]:
        requests: list[Any] = [t.request for t in travellers]
        payloads = [backend_of(r.payload).to_numpy(r.payload) for r in requests]
        for_partner: dict[int, list[np.ndarray]] = {}
        for request, payload in zip(requests, payloads, strict=True):
            if request.partner is not None:
                for_partner.setdefault(request.partner, []).append(payload)
        messages = {partner: np.concatenate(parts) for partner, parts in for_partner.items()}
        work = Work(self.comm, "swap of payloads", [swap(channel(), messages)])

        def deliver() -> None:
            starts = dict.fromkeys(messages, 0)
            for traveller, request, payload in zip(travellers, requests, payloads, strict=True):
                theirs = payload[:0]
                if request.partner is not None:
                    start = starts[request.partner]
                    starts[request.partner] += payload.nbytes
                    theirs = work.results[0][request.partner][start : starts[request.partner]]
                traveller.record.bytes_received += theirs.nbytes
                traveller.advance(backend_of(request.payload).from_numpy(theirs, request.payload))

        return work, deliver


_CARRIERS = {"gather": _Flight._gather, "alltoall": _Flight._alltoall, "swap": _Flight._swap}


def _describe(request: Collective) -> str:
    """What must be the same on all ranks."""
    if isinstance(request, Alltoall):
        return f"alltoall of {[backend_of(p).size(p) for p in request.payloads]}"
    if isinstance(request, Swap):
        return f"swap of {backend_of(request.payload).size(request.payload)}"
    if not isinstance(request, Gather):
        return f"{_kind(request)} of {backend_of(request.array).size(request.array)}"
    size = backend_of(request.payload).size(request.payload) if request.equal_sizes else "some"
    return f"gather of {size}"


def _kind(request: Collective) -> Any:
    if isinstance(request, Gather):
        return "gather"
    if isinstance(request, Alltoall):
        return "alltoall"
    if isinstance(request, Swap):
        return "swap"
    dtype = backend_of(request.array).dtype(request.array)
    if isinstance(request, Max):
        return "max", dtype
    return "sum", request.wire or dtype


def _on_wire(array: Any, dtype: str, predivide: float) -> np.ndarray:
    """Flat, in host memory, as it travels; bfloat16 as its bits."""
    if predivide != 1:
        array = array / predivide
    xp = backend_of(array)
    if dtype == "bfloat16":
        return to_bfloat16(xp.to_numpy(xp.cast(array, "float32")).reshape(-1))
    return xp.to_numpy(xp.cast(array, dtype)).reshape(-1)


def _split(
    message: np.ndarray, sizes: list[int], open_sizes: list[int], rank: int
) -> list[np.ndarray]:
    """Undo the concatenation: a table of the sizes that may differ, then all payloads."""
    start = LENGTH * len(open_sizes)
    sizes = list(sizes)
    for i, size in zip(open_sizes, message[:start].view("<i8").tolist(), strict=True):
        sizes[i] = size
    if min(sizes) < 0 or start + sum(sizes) != message.nbytes:
        raise PayloadError(
            f"the payloads of rank {rank} have sizes that do not fit their message: it was damaged"
        )
    parts = []
    for size in sizes:
        parts.append(message[start : start + size])
        start += size
    return parts
