"""Engines over a library whose collectives are asynchronous and have names.

``start`` submits the first round of an exchange and never waits, so it may be called from autograd
hooks.  ``finish`` waits for each exchange in turn, and submits its next round before it turns to
the following one.  Since every rank has submitted a round of all exchanges before it waits for any,
ranks may wait in different orders without deadlock.

The engines over Horovod for PyTorch and TensorFlow and over torch.distributed are subclasses.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, NamedTuple

from hvd_compress.agreement import SAME_TENSORS, Comparing, Terms, agreement
from hvd_compress.backends import backend_of
from hvd_compress.base import Array
from hvd_compress.engines.base import Engine
from hvd_compress.errors import MismatchError, PayloadError, UnsupportedError
from hvd_compress.requests import (
    Alltoall,
    Broadcast,
    Collective,
    Gather,
    Max,
    Neighbors,
    Sum,
)
from hvd_compress.requests.base import LENGTH, cut_at


class Op(NamedTuple):
    """One collective: "sum", "max", "gather", "gather_equal", "broadcast" or "alltoall".

    In an all-to-all, ``splits`` are the numbers of elements of the tensor for each rank.
    ``arriving`` are those that come from each, if they are known.  ``root`` has what is broadcast.
    ``in_place``: nobody needs the tensor afterwards, and a sum may be made in it.
    """

    kind: str
    name: str
    tensor: Array
    splits: Array | None = None
    arriving: Array | None = None
    root: int = 0
    in_place: bool = False


@dataclasses.dataclass(eq=False)
class InFlight:
    """An exchange as a generator of collectives, with the ``handle`` of the collective in flight,
    or the ``result``."""

    ops: Generator[Op, Any, Any]
    handle: Any = None
    is_over: bool = False
    result: Any = None
    replies: list[Any] = dataclasses.field(default_factory=list)


class NamedEngine(Comparing, Engine, abc.ABC):
    """Carries out exchanges by the named collectives of a library, which makes progress in its own
    threads."""

    #: ``_with_replies`` wants to know all that arrived, which takes memory until ``finish``
    keeps_replies: ClassVar[bool] = False

    sums_in_rank_order: bool = False
    #: ``poll`` begins the next round of all that has come in; else ``finish`` does
    moves_early: bool = False
    #: in front of all names, and unique among what is in flight
    prefix: str = "hvd_compress"

    def __init__(self) -> None:
        self._agreement: InFlight | None = None
        self._agreed_once = self._compares_at_once = False
        self._in_flight: dict[str, InFlight] = {}

    @abc.abstractmethod
    def _launch(self, op: Op) -> Any:
        """Submit a collective, and return a handle."""

    @abc.abstractmethod
    def _wait(self, handle: Any) -> Any:
        """Wait for a collective, and return its result."""

    def agree(self, terms: Terms, like: Array, at_once: bool = False) -> None:
        """Compare ``terms`` over the ranks, before all else comes in.

        The first time it comes in at once: ranks that differ from the start would submit other
        collectives, and nothing can call these back.
        """
        self._agreement = self._submit("agreement", agreement(terms, like))
        self._compares_at_once = at_once
        if not self._agreed_once:
            self._bring_in_agreement(at_once=True)
            self._agreed_once = True

    def check_step(self, describe: Callable[[], list[str]], planned: bool, like: Array) -> None:
        """Compare the ranks where tensors have no buckets yet: ranks that would make other buckets
        would submit what others never will.  Later names pair what belongs together."""
        if planned or self.size == 1:
            return
        self._bring_in_agreement(at_once=True)
        terms = {"exchange of": describe()}
        try:
            self._bring_in([self._submit("tensors", agreement(terms, like))])
        except MismatchError as error:
            raise MismatchError(f"{error}\n{SAME_TENSORS}") from None

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        """Submit the first round of an exchange."""
        self._in_flight[name] = self._submit(name, exchange)

    def poll(self) -> None:
        """See ``Engine.poll``; the library makes progress in its own threads."""
        if self.moves_early:
            for each in list(self._in_flight.values()):
                if not each.is_over and self._has_come(each.handle):
                    self._advance(each, self._wait(each.handle))

    def _has_come(self, handle: Any) -> bool:
        """Whether a collective can be waited for in the middle of backward."""
        return False

    def compare(self) -> None:
        self._bring_in_agreement(self._compares_at_once)

    def finish(self) -> dict[str, Any]:
        """Wait for all exchanges, and return their results by name."""
        self.compare()
        self._bring_in(list(self._in_flight.values()))
        done, self._in_flight = self._in_flight, {}
        self._raise_late()
        return {name: self._with_replies(each.result, each.replies) for name, each in done.items()}

    def abandon(self) -> None:
        """Discard everything in flight, after the collectives failed."""
        left, self._agreement, self._in_flight, self._late = self._in_flight, None, {}, None
        for each in left.values():
            each.ops.close()

    def _bring_in_agreement(self, at_once: bool = False) -> None:
        """Wait for the comparison of the ranks; unless it has to be ``at_once``, a subclass may do
        so in the next step."""
        comparison, self._agreement = self._agreement, None
        if comparison is not None:
            self._bring_in([comparison])
            self._note(comparison.result)

    def _bring_in(self, exchanges: Sequence[InFlight]) -> None:
        while not all(each.is_over for each in exchanges):
            for each in exchanges:
                if not each.is_over:
                    self._advance(each, self._wait(each.handle))

    def _submit(self, name: str, exchange: Generator[Any, Any, Any]) -> InFlight:
        each = InFlight(self._ops(f"{self.prefix}.{name}", exchange))
        self._advance(each, None)
        return each

    def _advance(self, each: InFlight, reply: Any) -> None:
        if self.keeps_replies and reply is not None:
            each.replies.append(reply)
        try:
            each.handle = self._launch(each.ops.send(reply))
        except StopIteration as stop:
            each.is_over, each.result = True, stop.value

    def _with_replies(self, result: Any, replies: list[Any]) -> Any:
        """For libraries that would leave out a collective whose reply the exchange ignores."""
        return result

    def _ops(self, name: str, exchange: Generator[Any, Any, Any]) -> Generator[Op, Any, Any]:
        """Requests become collectives named ``PREFIX.NAME.ROUND``."""
        reply, number = None, 0
        with contextlib.closing(exchange):
            while True:
                try:
                    request = exchange.send(reply)
                except StopIteration as stop:
                    return stop.value
                reply = yield from self._carry(request, f"{name}.{number}")
                number += 1

    def _carry(self, request: Collective, name: str) -> Generator[Op, Any, Any]:
        algorithm = getattr(request, "algorithm", None)
        if algorithm is not None:
            raise UnsupportedError(
                f"algorithm={algorithm!r} needs hvd_compress.mpi or hvd_compress.torch.mpi: here "
                "the library of collectives chooses; leave algorithm out"
            )
        if type(request) not in _WAYS:
            raise UnsupportedError(
                f"a request {type(request).__name__} needs hvd_compress.mpi or "
                "hvd_compress.torch.mpi: here the library has no such collective"
            )
        return (yield from _WAYS[type(request)](self, request, name))

    def _reduce(self, request: Sum, name: str) -> Generator[Op, Any, Array]:
        array, xp = request.array, backend_of(request.array)
        if xp.size(array) == 0:
            return array
        wire, divisor = request.wire, self._divisor(request.wire)
        sent = array if wire is None else xp.cast(array, wire)
        if divisor != 1:
            sent = xp.divided(sent, divisor)
        op = Op("sum", name, sent, in_place=request.owned or sent is not array)
        if wire is None:
            total = yield op
        else:
            add = self._sum_bfloat16 if wire == "bfloat16" else self._sum
            if request.narrow and divisor == 1:
                request.array = array = sent  # the wide one is freed; as many bytes count
                return (yield from add(op))
            rounded = yield from add(op)
            # A sum is multiplied in the array's own dtype: in 16 bits it would not fit again.
            if request.owned:
                xp.write_into([array], rounded)
                total = array
            else:
                total = xp.cast(rounded, xp.dtype(array))
        return total if divisor == 1 else xp.affine(total, divisor)

    def _divisor(self, wire: str | None) -> float:
        """Return what ranks divide by before a sum on that wire, which is multiplied by it."""
        return 1.0

    def _max(self, request: Max, name: str) -> Generator[Op, Any, Array]:
        array = request.array
        return (yield Op("max", name, array)) if backend_of(array).size(array) else array

    def _gather(self, request: Gather, name: str) -> Generator[Op, Any, list[Array]]:
        if request.equal_sizes:
            return self._split(request.payload, (yield Op("gather_equal", name, request.payload)))
        xp, payload = backend_of(request.payload), request.payload
        message = xp.concat([xp.pack_sizes([payload]), payload])
        everything = yield Op("gather", name, message)
        parts, start = [], 0
        for rank in range(self.size):
            # A table that is cut off reads as zero.
            (length,) = xp.unpack_sizes(everything[start : start + LENGTH], 1)
            start += LENGTH
            # Where sizes are symbols, the frame behind the length tells what is wrong with it.
            if not xp.traces and not 0 <= length <= xp.size(everything) - start:
                raise PayloadError(
                    f"the message of rank {rank} starts with a length of {length}, which cannot "
                    "be: it was damaged, or the parameter's gradient is sparse on some ranks and "
                    "dense on others; pass sparse_as_dense=True to hvd.DistributedOptimizer then"
                )
            parts.append(everything[start : start + length])
            start += length
        return parts

    def _alltoall(self, request: Alltoall, name: str) -> Generator[Op, Any, list[Array]]:
        payloads = request.payloads
        xp, mine = backend_of(payloads[0]), payloads[self.rank]
        splits = self._splits([xp.size(payload) for payload in payloads])
        arriving = self._splits([xp.size(mine)] * self.size) if request.equal_sizes else None
        # What arrived, and how much of it came from whom.
        op = Op("alltoall", name, xp.concat(payloads), splits, arriving)
        everything, received = yield op
        if request.equal_sizes:
            return self._split(mine, everything)
        return cut_at(everything, [received[rank] for rank in range(self.size)])

    def _neighbors(self, request: Neighbors, name: str) -> Generator[Op, Any, list[Array]]:
        """An all-to-all with nothing for all other ranks, since libraries have no such collective
        between some ranks alone."""
        payload, targets, sources = request.payload, request.targets, request.sources
        xp, equal, ranks = backend_of(payload), request.equal_sizes, range(self.size)
        size = xp.size(payload)
        splits = self._splits([size if rank in targets else 0 for rank in ranks])
        arriving = self._splits([size if rank in sources else 0 for rank in ranks])
        copies = xp.concat([payload] * len(targets)) if targets else payload[:0]
        op = Op("alltoall", name, copies, splits, arriving if equal else None)
        everything, received = yield op
        ascending = sorted(sources)
        if equal:
            rows = xp.reshape(everything, (len(sources), size))
            return [rows[ascending.index(source)] for source in sources]
        parts = cut_at(everything, [received[rank] for rank in ascending])
        return [parts[ascending.index(source)] for source in sources]

    def _broadcast(self, request: Broadcast, name: str) -> Generator[Op, Any, Array]:
        array = request.array
        if backend_of(array).size(array) == 0:
            return array
        return (yield Op("broadcast", name, array, root=request.root))

    @abc.abstractmethod
    def _splits(self, sizes: Sequence[int]) -> Array:
        """As the library's all-to-all wants them."""

    def _split(self, own: Array, everything: Array) -> list[Array]:
        """Return all ranks' payloads, which have the size of this rank's ``own``."""
        xp = backend_of(everything)
        size, found = xp.size(own), xp.size(everything)
        if found != size * self.size:
            raise PayloadError(
                f"the ranks' payloads differ in size: this rank's has {size} bytes, those of all "
                f"{self.size} together {found}. Do all run the same version with the same "
                "compression options, or is a gradient sparse on some ranks and dense on others "
                "(sparse_as_dense=True)?"
            )
        return cut_at(everything, [size] * self.size)

    def _sum(self, op: Op) -> Generator[Op, Any, Array]:
        return (yield op)

    #: some libraries cannot add it
    _sum_bfloat16 = _sum


_WAYS: dict[type[Collective], Callable[..., Generator[Op, Any, Any]]] = {
    Sum: NamedEngine._reduce,
    Max: NamedEngine._max,
    Gather: NamedEngine._gather,
    Alltoall: NamedEngine._alltoall,
    Neighbors: NamedEngine._neighbors,
    Broadcast: NamedEngine._broadcast,
}


@dataclasses.dataclass(eq=False)
class _Generation:
    """The engines over one set of workers, as far as they have been used."""

    size: int
    used: int = 0


class ProcessSetEngine(NamedEngine):
    """Carries out exchanges over one process set of Horovod.

    Names tell engines apart by numbers, which all ranks must give alike.  The order in which
    engines are first used is the same on all ranks, since that is a collective.  The order of their
    making is not, and some may be made on one rank alone.  Elastic training adds workers that have
    used none.  So another number of workers counts from the beginning, and is part of the name.
    Names also differ from those that a worker that died has left in Horovod's queue.

    Args:
        process_set: the ranks that take part; this rank must be one of them.
        predivide: arrays are divided by it before they are added, and sums multiplied by it.
    """

    #: by the beginning of the name and the ranks, since another process set may get the number of
    #: one that was removed
    _generations: ClassVar[dict[Any, _Generation]] = {}
    _counting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, process_set: Any, predivide: float = 1.0) -> None:
        super().__init__()
        self._set = process_set
        self._generation: _Generation | None = None
        self._number = 0  # in that
        self._predivide = predivide

    def _divisor(self, wire: str | None) -> float:
        return self._predivide

    @classmethod
    def begin_generation(cls) -> None:
        """Count engines from the beginning when a set of workers meets, some of which may have used
        none.  They share the order of uses from now on."""
        cls._generations.clear()

    # Elastic training changes both between steps.
    @property
    def rank(self) -> int:
        return self._set.rank()

    @property
    def size(self) -> int:
        return self._set.size()

    def _numbered(self, beginning: str) -> str:
        """Return the beginning of the names of this engine's collectives."""
        size = self.size
        key = beginning, tuple(self._set.ranks or ()) if self._set.process_set_id else None
        with self._counting:
            current = self._generations.get(key)
            if current is None or current.size != size:
                current = self._generations[key] = _Generation(size)
            if self._generation is not current:
                self._generation, self._number = current, current.used
                current.used += 1
        return f"{beginning}.{self._number}.of{size}"

    def _global_rank(self, rank: int) -> int:
        """Return a rank of the set as Horovod's broadcast wants it, which counts all ranks."""
        return rank if self._set.process_set_id == 0 else self._set.ranks[rank]
