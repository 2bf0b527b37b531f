"""Carries exchanges over mpi4py.

Exchanges start in the same order on all ranks, each round with tags of its own.  An exchange whose
round is over goes on with its next round by itself, so several rounds need not wait for each other.

Sums are added in the order of the ranks and half precisions in float32: results are those of the
lockstep world, bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.agreement import Terms, agreement
from hvd_compress.backends import backend_of
from hvd_compress.base import Alltoall, Array, Collective, Gather, Max, Sum, Swap
from hvd_compress.errors import MismatchError
from hvd_compress.mpi.dense.allgather import gather
from hvd_compress.mpi.dense.allreduce import CHUNK, start
from hvd_compress.mpi.dense.alltoall import alltoall, swap
from hvd_compress.mpi.dense.direct_allreduce import direct
from hvd_compress.mpi.transport.arrays import Flat
from hvd_compress.mpi.transport.communicator import Channel, Communicator
from hvd_compress.mpi.transport.progress import Work, wait_for
from hvd_compress.mpi.transport.reduction import from_bfloat16, to_bfloat16

#: tags of one exchange, and of one of its rounds; a round opens fewer channels than it has tags
_TAGS, _ROUND = 1024, 256
#: channels that one sum may open
_BLOCKS = 24


class MpiEngine:
    """Exchanges over a communicator, of which it makes a duplicate: a collective.

    Args:
        comm: ``None`` for all ranks.
        predivide: sums are scaled by 1 / predivide before and by predivide after adding.
    """

    is_collective = True

    def __init__(
        self, comm: MPI.Comm | Communicator | None = None, *, predivide: float = 1.0
    ) -> None:
        self.comm = Communicator.of(comm).duplicate()
        self.predivide = predivide
        self._agreement: _InFlight | None = None
        self._in_flight: dict[str, _InFlight] = {}
        self._started = 0  # exchanges ever

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

    def check_step(self, describe: Callable[[], str]) -> None:
        """Compare, for as many steps as the communicator checks calls."""
        self._bring_in_agreement()
        if not self.comm.checks:
            return
        try:
            self.comm.agree(f"exchange of {describe()}")
        except MismatchError as error:
            raise MismatchError(
                f"{error}\nAll ranks must exchange the same tensors in a step. If a gradient is "
                "sparse on some ranks and dense on others, pass sparse_as_dense=True"
            ) from None

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        self.comm.check()
        self._in_flight[name] = self._launch(name, exchange)

    def poll(self) -> None:
        for each in self._in_flight.values():
            each.poll()

    def finish(self) -> dict[str, Any]:
        self.comm.check()
        self._bring_in_agreement()
        wait_for(self.comm, list(self._in_flight.values()))
        done, self._in_flight = self._in_flight, {}
        return {name: each.result for name, each in done.items()}

    def _bring_in_agreement(self) -> None:
        comparison, self._agreement = self._agreement, None
        if comparison is not None:
            wait_for(self.comm, [comparison])

    def abandon(self) -> None:
        """Others may go on with the step, and what they send must never be taken for what is sent
        later: if gradients have left, this engine cannot be used again.  The comparison of the
        ranks has tags of its own, and comes to its end by itself."""
        left = list(self._in_flight.values())
        self._agreement, self._in_flight = None, {}
        if left:
            self.comm.give_up("a step was abandoned in the middle", left)

    def close(self) -> None:
        """Give the duplicate of the communicator back: a collective."""
        self.comm.free()

    def _launch(self, name: str, exchange: Generator[Any, Any, Any]) -> _InFlight:
        # Tags are used again after a while: whoever had them must be done by then.
        generations = self.comm.tags // 2 // _TAGS
        under_way = [*([self._agreement] if self._agreement else []), *self._in_flight.values()]
        if len(under_way) >= generations:
            wait_for(self.comm, under_way[: len(under_way) - generations + 1])
        tag = self.comm.tags // 2 + self._started % generations * _TAGS
        self._started += 1
        return _InFlight(self, name, exchange, tag)


class _InFlight:
    """An exchange, one round after the other."""

    call = "exchange of gradients"

    def __init__(
        self, engine: MpiEngine, name: str, exchange: Generator[Any, Any, Any], tag: int
    ) -> None:
        self.comm, self._predivide = engine.comm, engine.predivide
        self.result: Any = None
        self._name, self._exchange = name, exchange
        self._tag, self._round = tag, 0
        self._work: Work | None = None
        self._reply: Callable[[], Any] = lambda: None
        self._advance()
        if not self.is_over:  # so it moves, and reports damage, whatever is waited for
            self.comm.under_way.add(self)

    @property
    def is_over(self) -> bool:
        return self._work is None

    @property
    def is_bulk(self) -> bool:
        return self._work is None or self._work.is_bulk

    def describe(self) -> str:
        what = "waits for nothing" if self._work is None else self._work.describe()
        return f"{what}, with {self._name}"

    def poll(self) -> bool:
        moved = self._work is not None and self._work.poll()
        while self._work is not None and self._work.is_over:
            moved = True
            self._advance()
        if self.is_over:
            self.comm.under_way.discard(self)
        return moved

    def _advance(self) -> None:
        """Hand in the reply of a round, and submit the next."""
        try:
            request = self._exchange.send(self._reply())
        except StopIteration as stop:
            self._work, self.result = None, stop.value
            return
        tags = itertools.count(self._tag + self._round % (_TAGS // _ROUND) * _ROUND)
        self._round += 1
        carry = _CARRIERS[type(request)]
        self._work, self._reply = carry(self, request, lambda: self.comm.channel(next(tags)))

    def _reduce(
        self, request: Sum | Max, channel: Callable[[], Channel]
    ) -> tuple[Work, Callable[[], Any]]:
        xp, array = backend_of(request.array), request.array
        op = "max" if isinstance(request, Max) else "sum"
        dtype = getattr(request, "wire", None) or xp.dtype(array)
        scale = self._predivide if op == "sum" else 1.0
        total = _on_wire(array, dtype, scale)
        flat = Flat(total, dtype, total.shape, lambda done: done)
        chunk = max(CHUNK, -(-total.nbytes // (self.comm.size * _BLOCKS)))
        call = f"{op} of gradients"
        work = start(self.comm, call, direct, flat, total, op, chunk, channel=channel)

        def reply() -> Any:
            result = from_bfloat16(total) if dtype == "bfloat16" else total
            summed = xp.cast(xp.from_numpy(result, array), xp.dtype(array))
            summed = xp.reshape(summed, xp.shape(array))
            return summed * scale if scale != 1 else summed

        return work, reply

    def _gather(
        self, request: Gather, channel: Callable[[], Channel]
    ) -> tuple[Work, Callable[[], Any]]:
        xp, payload = backend_of(request.payload), request.payload
        algorithm = gather(channel(), xp.to_numpy(payload), request.equal_sizes)
        work = Work(self.comm, "gathering of payloads", [algorithm])
        return work, lambda: [xp.from_numpy(part, payload) for part in work.results[0]]

    def _alltoall(
        self, request: Alltoall, channel: Callable[[], Channel]
    ) -> tuple[Work, Callable[[], Any]]:
        xp, like = backend_of(request.payloads[0]), request.payloads[0]
        messages = [xp.to_numpy(payload) for payload in request.payloads]
        algorithm = alltoall(channel(), messages, request.equal_sizes)
        work = Work(self.comm, "all-to-all of payloads", [algorithm])
        return work, lambda: [xp.from_numpy(part, like) for part in work.results[0]]

    def _swap(
        self, request: Swap, channel: Callable[[], Channel]
    ) -> tuple[Work, Callable[[], Any]]:
        xp, payload, partner = backend_of(request.payload), request.payload, request.partner
        messages = {} if partner is None else {partner: xp.to_numpy(payload)}
        work = Work(self.comm, "swap of payloads", [swap(channel(), messages)])

        def reply() -> Any:
            none = partner is None
            return payload[:0] if none else xp.from_numpy(work.results[0][partner], payload)

        return work, reply


_CARRIERS: dict[type[Collective], Any] = {
    Sum: _InFlight._reduce,
    Max: _InFlight._reduce,
    Gather: _InFlight._gather,
    Alltoall: _InFlight._alltoall,
    Swap: _InFlight._swap,
}


def _on_wire(array: Any, dtype: str, predivide: float) -> np.ndarray:
    """A flat copy in host memory, as it is sent; bfloat16 as its bits."""
    if predivide != 1:
        array = array / predivide
    xp = backend_of(array)
    if dtype == "bfloat16":
        return to_bfloat16(xp.to_numpy(xp.cast(array, "float32")).reshape(-1))
    cast = xp.cast(array, dtype)
    own = xp.to_numpy(cast).reshape(-1)
    return own.copy() if predivide == 1 and cast is array else own
