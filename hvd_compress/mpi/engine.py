"""The engine over mpi4py.

Exchanges start in the same order on all ranks, and each round has its own tags.  An exchange whose
round is complete starts its next round at once, without waiting for other exchanges.

Sums are added in the order of the ranks and half precisions in float32: results are those of the
lockstep world, bit for bit.  MPI's own collectives, which have no tags, are not used here.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.agreement import SAME_TENSORS, Comparing, Terms, agreement
from hvd_compress.backends import backend_of, numpy
from hvd_compress.backends.halves import from_bfloat16, to_bfloat16
from hvd_compress.base import Array, Sparse
from hvd_compress.engines.base import Engine
from hvd_compress.errors import MismatchError
from hvd_compress.meetings.sparse_vectors import densify, give_back
from hvd_compress.mpi.collectives.choosing import alone, dense_of_exchange, sparse_of_exchange
from hvd_compress.mpi.collectives.dense import ALGORITHMS
from hvd_compress.mpi.collectives.dense_algorithm import DEPTH
from hvd_compress.mpi.collectives.dense_running import blocks
from hvd_compress.mpi.collectives.payloads import alltoall, broadcast
from hvd_compress.mpi.collectives.sparse_running import prepare
from hvd_compress.mpi.transport.arrays import HALVES
from hvd_compress.mpi.transport.channel import Channel, exchange
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.progress import Algorithm, Work, wait_for
from hvd_compress.requests import (
    Alltoall,
    Broadcast,
    Collective,
    Gather,
    Max,
    Neighbors,
    SparseSum,
    SparseTotal,
    Sum,
)
from hvd_compress.requests.algorithms import DENSE

#: tags of one exchange, and of one of its rounds; a round opens fewer channels than it has tags
_TAGS, _ROUND = 1024, 256
#: seconds between two looks at what is in flight, which bindings ask for after every layer
_PAUSE = 1e-4


def _reduce(request: Sum | Max, comm: Communicator, tag: int, predivide: float) -> Algorithm:
    array = request.array
    xp = numpy if isinstance(array, np.ndarray) else backend_of(array)
    dtype = own_dtype = array.dtype.name if xp is numpy else xp.dtype(array)
    op, name, scale, owned = "max", "direct", 1.0, False
    if isinstance(request, Sum):
        op, name, dtype = "sum", request.algorithm or "direct", request.wire or own_dtype
        scale, owned = predivide, request.owned
    # Rounding is left to the blocks on their way, which are in the cache, while others are sent.
    is_rounded_late = (
        dtype in HALVES and own_dtype == "float32" and str(getattr(array, "device", "cpu")) == "cpu"
    )
    sent_from = "float32" if is_rounded_late else dtype
    # Rounded first: what is too large by itself is sent as Inf, whatever the others have.
    sent = array if scale == 1 else xp.divided(xp.round_to(array, dtype), scale)
    own, is_ours = _on_wire(xp, sent, sent_from)
    total = own if owned or is_ours or sent is not array else np.empty_like(own)

    if name in DENSE:
        algorithm = ALGORITHMS[name]
    else:
        nbytes = own.nbytes // 2 if is_rounded_late else own.nbytes
        algorithm = yield from alone(comm, lambda: dense_of_exchange(comm, name, nbytes, dtype))
    algorithms = blocks(comm, algorithm, own, dtype, total, op, tag=tag)
    if len(algorithms) == 1:
        yield from algorithms[0]
    elif algorithms:
        yield Work(comm, f"{op} of gradients", algorithms, DEPTH)
    result = from_bfloat16(total) if sent_from == "bfloat16" else total
    if xp is numpy:
        summed = result.astype(own_dtype, copy=False).reshape(array.shape)
    else:
        summed = xp.cast(xp.from_numpy(result, array), own_dtype)
        summed = xp.reshape(summed, xp.shape(array))
    return summed * scale if scale != 1 else summed


def _sparse_sum(request: SparseSum, comm: Communicator, tag: int, predivide: float) -> Algorithm:
    run = yield from alone(comm, lambda: sparse_of_exchange(comm, request.algorithm))
    options = request.wire, "packed", "sum"
    form, brought, rounded_off, like = prepare(request.sparse, request.n, comm, *options)
    channel = Channel(comm, tag)
    total, lost = yield from run(channel, brought, form)
    return SparseTotal(
        give_back(densify(total, form.n) if isinstance(total, Sparse) else total, like),
        give_back(form.not_sent([rounded_off, lost]), like),
        channel.bytes_sent,
        channel.bytes_received,
    )


def _gather(request: Gather, comm: Communicator, tag: int, predivide: float) -> Algorithm:
    payload, ranks = request.payload, comm.peers
    message = _on_host(payload)
    like = message if request.equal_sizes else None
    messages = dict.fromkeys(ranks, message)
    arrived = yield from exchange(Channel(comm, tag), messages, ranks, "payloads", like=like)
    arrived[comm.rank] = message
    return _like(payload, list(map(arrived.__getitem__, range(comm.size))))


def _alltoall(request: Alltoall, comm: Communicator, tag: int, predivide: float) -> Algorithm:
    messages = list(map(_on_host, request.payloads))
    arrived = yield from alltoall(Channel(comm, tag), messages, request.equal_sizes)
    return _like(request.payloads[0], arrived)


def _neighbors(request: Neighbors, comm: Communicator, tag: int, predivide: float) -> Algorithm:
    payload, sources = request.payload, request.sources
    message = _on_host(payload)
    like = message if request.equal_sizes else None
    messages = dict.fromkeys(request.targets, message)
    phase = "messages of neighbours"
    arrived = yield from exchange(Channel(comm, tag), messages, sources, phase, like=like)
    return _like(payload, list(map(arrived.__getitem__, sources)))


def _broadcast(request: Broadcast, comm: Communicator, tag: int, predivide: float) -> Algorithm:
    xp, array = backend_of(request.array), request.array
    buffer, is_ours = _on_wire(xp, array, xp.dtype(array))
    buffer = buffer if is_ours else buffer.copy()
    yield from broadcast(Channel(comm, tag), buffer.view(np.uint8), request.root)
    result = from_bfloat16(buffer) if xp.dtype(array) == "bfloat16" else buffer
    return xp.reshape(xp.cast(xp.from_numpy(result, array), xp.dtype(array)), xp.shape(array))


#: by the kind of a request, what carries it out, given the communicator of the ranks, the first tag
#: that nothing else uses in it, and by what arrays are divided before they are
#: added, and sums multiplied
CARRIERS: dict[type[Collective], Callable[..., Algorithm]] = {
    Sum: _reduce,
    Max: _reduce,
    SparseSum: _sparse_sum,
    Gather: _gather,
    Alltoall: _alltoall,
    Neighbors: _neighbors,
    Broadcast: _broadcast,
}


def _on_host(payload: Array) -> np.ndarray:
    found: np.ndarray = payload
    if not isinstance(payload, np.ndarray):
        found = backend_of(payload).to_numpy(payload)
    return found


def _like(payload: Array, arrived: list[np.ndarray]) -> list[Array]:
    """Return messages as arrays of the kind of a payload."""
    if isinstance(payload, np.ndarray):
        return arrived
    xp = backend_of(payload)
    return [xp.from_numpy(message, payload) for message in arrived]


def _on_wire(xp: Any, array: Any, dtype: str) -> tuple[np.ndarray, bool]:
    """Return a flat array in host memory, as it is sent, bfloat16 as its bits.

    The second result says whether it is a new one, not the memory of ``array``.
    """
    if dtype == "bfloat16":
        return to_bfloat16(xp.to_numpy(xp.cast(array, "float32")).reshape(-1)), True
    if xp is numpy and array.dtype.name == dtype:
        return array.reshape(-1), False
    cast = xp.cast(array, dtype)
    return xp.to_numpy(cast).reshape(-1), cast is not array


class MpiEngine(Comparing, Engine):
    """Carries out exchanges over a communicator.

    Making one duplicates the communicator, which is a collective.  :meth:`close` frees the
    duplicate; the making of another one does so after all ranks have dropped this.

    Args:
        comm: ``None`` for all ranks.
        predivide: arrays are divided by it before they are added, and sums multiplied by it.

    >>> engine = MpiEngine(MPI.COMM_SELF)
    >>> engine.rank, engine.size
    (0, 1)
    >>> engine.close()
    """

    is_collective = True
    rank, size = 0, 1

    def __init__(
        self, comm: MPI.Comm | Communicator | None = None, *, predivide: float = 1.0
    ) -> None:
        self.comm = Communicator.of(comm).duplicate("a new optimizer, reducer or engine")
        self.rank, self.size = self.comm.rank, self.comm.size
        self.predivide = predivide
        self._agreement: Work | None = None
        self._in_flight: dict[str, Work] = {}
        self._started = 0  # exchanges ever
        self._polled = 0.0  # when

    def agree(self, terms: Terms, like: Array, at_once: bool = False) -> None:
        self._check()
        # In host memory, wherever the gradients are.
        self._agreement = self._launch("agreement", agreement(terms))

    def check_step(self, describe: Callable[[], list[str]], planned: bool, like: Array) -> None:
        """Compare the ranks, for as many steps as the communicator checks calls."""
        self.compare()
        if not self.comm.checks:
            return
        try:
            self.comm.agree(f"exchange of {', '.join(describe())}")
        except MismatchError as error:
            raise MismatchError(f"{error}\n{SAME_TENSORS}") from None

    def start(self, name: str, exchange: Generator[Any, Any, Any]) -> None:
        self._check()
        self._in_flight[name] = self._launch(name, exchange)

    def _check(self) -> None:
        """Raise if nothing can be received any more."""
        if self.comm.handles.is_broken or self.comm.mpi == MPI.COMM_NULL:
            self.comm.check()

    def poll(self) -> None:
        if self._in_flight and (now := time.perf_counter()) > self._polled + _PAUSE:
            self._polled = now
            for each in self._in_flight.values():
                each.poll()

    def finish(self) -> dict[str, Any]:
        self._check()
        self.compare()
        wait_for(self.comm, list(self._in_flight.values()))
        done, self._in_flight = self._in_flight, {}
        self._raise_late()
        return {name: each.results[0] for name, each in done.items()}

    def compare(self) -> None:
        comparison, self._agreement = self._agreement, None
        if comparison is not None:
            wait_for(self.comm, [comparison])
            self._note(comparison.results[0])

    def abandon(self) -> None:
        """Discard everything in flight.

        Other ranks may go on with the step, and their messages must not be taken for later ones.
        So this engine cannot be used again if gradients have been sent.  The comparison of the
        ranks has its own tags, and completes by itself.
        """
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
        work = Work(self.comm, "exchange of gradients", [self._rounds(exchange, tag)])
        work.note = f", with {name}"
        return work

    def _rounds(self, exchange: Generator[Any, Any, Any], tag: int) -> Algorithm:
        """Carry out the rounds of an exchange one after the other, and return its result."""
        with contextlib.closing(exchange):
            reply = None
            for number in itertools.count():
                try:
                    request = exchange.send(reply)
                except StopIteration as stop:
                    return stop.value
                at, carry = tag + number % (_TAGS // _ROUND) * _ROUND, CARRIERS[type(request)]
                try:
                    reply = yield from carry(request, self.comm, at, self.predivide)
                except (Exception, KeyboardInterrupt) as error:
                    # Others may go on with what this rank could not read.
                    self.comm.give_up(f"exchange of gradients: {error!r}", [])
                    raise
