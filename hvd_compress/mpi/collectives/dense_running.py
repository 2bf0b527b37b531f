"""Dense allreduce by an algorithm, in blocks of an array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_compress.backends import halves
from hvd_compress.mpi.collectives.dense_algorithm import DEPTH, Allreduce
from hvd_compress.mpi.transport.channel import Channel
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.progress import Algorithm, Work
from hvd_compress.mpi.transport.reduction import Reduction
from hvd_compress.sharding import shards_of

#: bytes of one message
CHUNK = 512 * 1024
#: blocks that each have a tag, at most
_BLOCKS = 24


def blocks(
    comm: Communicator,
    algorithm: Allreduce,
    x: Any,
    dtype: str,
    out: Any,
    op: str,
    chunk: int = CHUNK,
    tag: int | None = None,
) -> list[Algorithm]:
    """Return the allreduce of a flat array into another one or itself, in blocks.

    A float32 array of a half precision is sent in that: blocks are rounded on their way.

    Args:
        dtype: of ``x``, see :class:`.Flat`.
        chunk: the bytes of a message.
        tag: of the first block, whose followers have the next ones; ``None``: any.  With one the
            blocks are few, and their messages longer.
    """
    reduce, itemsize = Reduction(op, dtype, comm.size), x.itemsize
    pieces = algorithm.pieces(comm.size)
    is_rounded = reduce.widens and itemsize == 4
    if comm.size == 1 and is_rounded:
        halves.narrow(x, half := reduce.scratch(len(x), wide=False))
        halves.widen(half, out)
    elif comm.size == 1 and out is not x:
        out[:] = x
    if comm.size == 1 or not len(x):
        return []
    # The same on ranks that reduce in place and on those that do not.
    itemsize = 2 if is_rounded else itemsize
    if tag is not None:
        chunk = max(chunk, -(-len(x) * itemsize // (pieces * _BLOCKS)))
    per_block = max(1, chunk // itemsize) * pieces
    steps = functools.partial(_rounded, algorithm.run) if is_rounded else algorithm.run
    found: list[Algorithm] = []
    for block in shards_of(len(x), -(-len(x) // per_block)):
        channel = comm.channel() if tag is None else Channel(comm, tag + len(found))
        # A view of its own is not the same object, but in place is in place.
        part = x[block]
        found.append(steps(channel, part, part if out is x else out[block], reduce))
    return found


def _rounded(
    run: Callable[..., Any], channel: Channel, x: np.ndarray, out: np.ndarray, reduction: Reduction
) -> Any:
    """Reduce float32 in a half precision."""
    half = reduction.scratch(len(x), wide=False)
    halves.narrow(x, half, threads=1)
    yield from run(channel, half, half, reduction)
    halves.widen(half, out, threads=1)
    reduction.give_back(half)


def reducing(
    comm: Communicator,
    call: str,
    algorithm: Allreduce,
    x: Any,
    dtype: str,
    out: Any,
    op: str,
    chunk: int = CHUNK,
) -> Work:
    """Begin an allreduce, which others see as ``call``; see :func:`blocks`."""
    return Work(comm, call, blocks(comm, algorithm, x, dtype, out, op, chunk), DEPTH)
