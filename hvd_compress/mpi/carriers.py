"""How each kind of request is carried out over MPI: as work in flight, and a function that makes
the reply from its result.

An exchange has its own tags, so collectives of several exchanges may overtake each other; MPI's own
collectives, which have no tags, are not used here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress.backends import backend_of
from hvd_compress.backends.halves import from_bfloat16, to_bfloat16
from hvd_compress.base import Sparse
from hvd_compress.config import check_choice
from hvd_compress.meetings.sparse_vectors import densify, give_back
from hvd_compress.mpi.dense.payloads import alltoall, broadcast, gather, swap
from hvd_compress.mpi.dense.running import CHUNK, start
from hvd_compress.mpi.sparse.running import prepare
from hvd_compress.mpi.transport.arrays import HALVES, Flat
from hvd_compress.mpi.transport.communicator import Channel, Communicator
from hvd_compress.mpi.transport.progress import Algorithm, Work
from hvd_compress.mpi.tuning.choosing import dense_of_exchange, sparse_of_exchange
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
from hvd_compress.requests.algorithms import SPARSE_SUMS, SUMS
from hvd_compress.requests.base import itemsize

Carried = tuple[Work, Callable[[], Any]]

#: blocks that a sum is cut into, each with a tag, at most
_BLOCKS = 24


def carry(request: Collective, comm: Communicator, tag: int, predivide: float) -> Carried:
    """Begin.

    Args:
        request: a request of an exchange.
        comm: the communicator of the ranks.
        tag: the first tag that nothing else uses, in ``comm`` and its subgroups.
        predivide: arrays are divided by it before they are added, and sums multiplied by it.
    """
    tags = itertools.count(tag)
    return _CARRIERS[type(request)](request, comm, lambda: comm.channel(next(tags)), predivide)


def _reduce(
    request: Sum | Max, comm: Communicator, channel: Callable[[], Channel], predivide: float
) -> Carried:
    xp, array, dtype = backend_of(request.array), request.array, request.wire_dtype
    if isinstance(request, Sum):
        op, name = "sum", request.algorithm or "direct"
        scale, owned = predivide, request.owned
    else:
        op, name, scale, owned = "max", "direct", 1.0, False
    # Rounding is left to the blocks on their way, which are in the cache, while others are sent.
    is_rounded_late = (
        dtype in HALVES
        and xp.dtype(array) == "float32"
        and str(getattr(array, "device", "cpu")) == "cpu"
    )
    sent_from = "float32" if is_rounded_late else dtype
    # Rounded first: what is too large by itself is sent as Inf, whatever the others have.
    sent = array if scale == 1 else xp.divided(xp.round_to(array, dtype), scale)
    own, is_ours = _on_wire(sent, sent_from)
    total = own if owned or is_ours or sent is not array else np.empty_like(own)

    check_choice("algorithm", name, SUMS)
    nbytes = len(own) * itemsize(dtype)
    algorithm = dense_of_exchange(comm, name, nbytes, dtype)
    chunk = max(CHUNK, -(-nbytes // (algorithm.pieces(comm.size) * _BLOCKS)))
    call, flat = f"{op} of gradients", Flat(own, dtype, own.shape, lambda done: done)
    work = start(comm, call, algorithm, flat, total, op, chunk=chunk, channel=channel)

    def reply() -> Any:
        result = from_bfloat16(total) if sent_from == "bfloat16" else total
        summed = xp.cast(xp.from_numpy(result, array), xp.dtype(array))
        summed = xp.reshape(summed, xp.shape(array))
        return summed * scale if scale != 1 else summed

    return work, reply


def _sparse_sum(
    request: SparseSum, comm: Communicator, channel: Callable[[], Channel], predivide: float
) -> Carried:
    check_choice("algorithm", request.algorithm, SPARSE_SUMS)
    options = {"values": request.wire, "indices": "packed", "op": "sum", "may_be_dense": True}
    form, brought, rounded_off, like = prepare(request.sparse, request.n, comm, **options)
    through, run = channel(), sparse_of_exchange(comm, request.algorithm)
    work = Work(comm, "sparse sum of gradients", [run(through, brought, form)])

    def reply() -> SparseTotal:
        total, lost = work.results[0]
        return SparseTotal(
            give_back(densify(total, form.n) if isinstance(total, Sparse) else total, like),
            give_back(form.not_sent([rounded_off, lost]), like),
            through.bytes_sent,
            through.bytes_received,
        )

    return work, reply


def _gather(
    request: Gather, comm: Communicator, channel: Callable[[], Channel], predivide: float
) -> Carried:
    message = backend_of(request.payload).to_numpy(request.payload)
    algorithm = gather(channel(), message, request.equal_sizes)
    return _payloads(comm, "gathering of payloads", algorithm, request.payload)


def _alltoall(
    request: Alltoall, comm: Communicator, channel: Callable[[], Channel], predivide: float
) -> Carried:
    messages = [backend_of(payload).to_numpy(payload) for payload in request.payloads]
    algorithm = alltoall(channel(), messages, request.equal_sizes)
    return _payloads(comm, "all-to-all of payloads", algorithm, request.payloads[0])


def _neighbors(
    request: Neighbors, comm: Communicator, channel: Callable[[], Channel], predivide: float
) -> Carried:
    message = backend_of(request.payload).to_numpy(request.payload)
    outgoing, like = dict.fromkeys(request.targets, message), message
    sizes = like if request.equal_sizes else None
    algorithm = swap(channel(), outgoing, request.sources, sizes, "messages of neighbours")
    return _payloads(comm, "exchange with neighbours", algorithm, request.payload)


def _payloads(comm: Communicator, call: str, algorithm: Algorithm, like: Any) -> Carried:
    """Begin an exchange of bytes, whose reply are arrays like ``like``."""
    work = Work(comm, call, [algorithm])
    return work, lambda: [backend_of(like).from_numpy(part, like) for part in work.results[0]]


def _broadcast(
    request: Broadcast, comm: Communicator, channel: Callable[[], Channel], predivide: float
) -> Carried:
    xp, array = backend_of(request.array), request.array
    buffer, is_ours = _on_wire(array, xp.dtype(array))
    buffer = buffer if is_ours else buffer.copy()
    algorithm = broadcast(channel(), buffer.view(np.uint8), request.root)
    work = Work(comm, f"broadcast from rank {request.root}", [algorithm])

    def reply() -> Any:
        result = from_bfloat16(buffer) if xp.dtype(array) == "bfloat16" else buffer
        return xp.reshape(xp.cast(xp.from_numpy(result, array), xp.dtype(array)), xp.shape(array))

    return work, reply


_CARRIERS: dict[type[Collective], Callable[..., Carried]] = {
    Sum: _reduce,
    Max: _reduce,
    SparseSum: _sparse_sum,
    Gather: _gather,
    Alltoall: _alltoall,
    Neighbors: _neighbors,
    Broadcast: _broadcast,
}


def _on_wire(array: Any, dtype: str) -> tuple[np.ndarray, bool]:
    """Return a flat array in host memory, as it is sent, bfloat16 as its bits; and whether it is
    ours: a new one, and not the memory of ``array``."""
    xp = backend_of(array)
    if dtype == "bfloat16":
        return to_bfloat16(xp.to_numpy(xp.cast(array, "float32")).reshape(-1)), True
    cast = xp.cast(array, dtype)
    return xp.to_numpy(cast).reshape(-1), cast is not array
