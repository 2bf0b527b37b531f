"""Dense allreduce by an algorithm, in blocks of an array."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hvd_compress.backends import halves
from hvd_compress.config import check_choice
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.dense import ALGORITHMS
from hvd_compress.mpi.dense.algorithm import Allreduce
from hvd_compress.mpi.dense.mpi import ALGORITHM as MPIS_OWN
from hvd_compress.mpi.dense.mpi import at_once
from hvd_compress.mpi.transport.arrays import HALVES, Flat, describe, flatten
from hvd_compress.mpi.transport.channel import Channel, nbytes
from hvd_compress.mpi.transport.communicator import Comm, Communicator
from hvd_compress.mpi.transport.progress import Algorithm, Work
from hvd_compress.mpi.transport.reduction import Reduction, reduction_of
from hvd_compress.sharding import shards_of

#: returns the algorithm of a name, for so many bytes of a dtype
Choose = Callable[[Communicator, str, int, str], Allreduce]

#: bytes of one message
CHUNK = 512 * 1024
#: blocks that each have a tag, at most
_BLOCKS = 24
#: kinds of arrays whose algorithm is remembered
_KINDS = 4096


def run(
    x: Any,
    op: str,
    algorithm: str,
    out: Any,
    comm: Comm,
    *,
    chunk: int,
    choose: Choose | None = None,
    nodes: str = "",
) -> Any:
    """Reduce an array over all ranks; see :func:`hvd_compress.mpi.allreduce`.

    Args:
        choose: returns the algorithm of the name, when all ranks have agreed on the call; ``None``:
            "auto" is not among the names.
        nodes: those that it goes by way of, as text after the name of the algorithm.
    """
    communicator, function = Communicator.of(comm), "allreduce"
    if nodes:
        function = "hierarchical_allreduce"
    kind = chosen = None
    if type(x) is np.ndarray and not communicator.checks and not nodes:
        # What a small array takes is mostly Python, and a kind seen before takes little of it.
        kind = x.dtype, x.shape, op, algorithm, chunk
        chosen, is_short = communicator.choices.get(kind, (None, False))
        if is_short:
            target = np.empty(x.shape, x.dtype) if out is None else out
            if _is_plain(x, target):
                at_once(communicator, x, target, op, lambda: Call(x, op, MPIS_OWN.name))
                return target
    with communicator.told():
        check_choice("algorithm", algorithm, ("auto", *ALGORITHMS))
        if chunk < 64:
            raise ConfigError(f"chunk={chunk} bytes: at least 64")
        flat = flatten(x)
        target = _target_of(out, x, flat)
    cut = "" if chunk == CHUNK else f", chunk={chunk}"
    communicator.agree(Call(flat, op, communicator.named(algorithm) + nodes + cut, function))
    if chosen is None and choose is not None:
        chosen = choose(communicator, algorithm, nbytes(flat.array), flat.dtype)
    chosen = chosen or ALGORITHMS[algorithm]
    call = Call(flat, op, chosen.name + nodes, function)
    algorithms = blocks(communicator, chosen, flat.array, flat.dtype, target.array, op, chunk)
    Work(communicator, call, algorithms, chosen.depth).wait()
    done = target.give_back(target.array)
    if kind is not None:
        is_short = chosen is MPIS_OWN and 0 < flat.array.nbytes <= MPIS_OWN.pieces(1) * chunk
        if len(communicator.choices) >= _KINDS:
            communicator.choices.clear()
        communicator.choices[kind] = chosen, is_short and flat.dtype not in HALVES
    return done if out is None else _assign(out, done)


def _is_plain(x: np.ndarray, out: Any) -> bool:
    """Return whether MPI can read ``x`` where it is, and write the result into ``out``."""
    if not x.flags.c_contiguous:
        return False
    if out is x:
        return x.flags.writeable
    return (
        type(out) is np.ndarray
        and out.dtype == x.dtype
        and out.shape == x.shape
        and out.flags.carray
        # Two arrays that own their memory are apart.
        and ((x.base is None and out.base is None) or not np.may_share_memory(x, out))
    )


class Call(NamedTuple):
    """The call of the user; the text is made when somebody wants to read it."""

    x: Any
    op: str
    algorithm: str
    function: str = "allreduce"

    def __str__(self) -> str:
        x = self.x if isinstance(self.x, Flat) else flatten(self.x)
        return f"{self.function}({describe(x)}, {self.op}, {self.algorithm})"


def _target_of(out: Any, x: Any, flat: Flat) -> Flat:
    """Return the array that the result is made in, ``out`` itself if that is possible; ``flat`` is
    ``x`` flat.

    Raises:
        ConfigError: ``out`` cannot be written, or differs from ``x`` in shape, dtype or device.
    """
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ConfigError("out is read-only: pass an array that can be written, or out=None")
    if out is x:
        return flat
    if out is not None:
        target, is_host = flatten(out), isinstance(flat.array, np.ndarray)
        if isinstance(target.array, np.ndarray) != is_host:
            raise ConfigError("out and x must be on the same device")
        if (target.dtype, target.shape) != (flat.dtype, flat.shape):
            raise ConfigError(
                f"out is {describe(target)} and x is {describe(flat)}: they must be alike"
            )
        if _is_same(target.array, flat.array):  # a view of the whole of x is x
            return flat
        if not (is_host and np.may_share_memory(target.array, flat.array)):
            return target
    array = flat.array
    fresh = np.empty_like(array) if isinstance(array, np.ndarray) else array.new_empty(len(array))
    return flat._replace(array=fresh)


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
    reduce = reduction_of(op, dtype, x, comm.size)
    itemsize = x.itemsize if isinstance(x, np.ndarray) else x.element_size()
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


def _is_same(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray):
        return isinstance(y, np.ndarray) and len(x) > 0 and x.ctypes.data == y.ctypes.data
    return x.data_ptr() == y.data_ptr()


def _assign(out: Any, done: Any) -> Any:
    """Put the result into ``out``, unless it was made there."""
    if isinstance(out, np.ndarray):
        if not np.may_share_memory(out, done):
            out[...] = done
    elif not _is_same(out, done):
        out.detach().copy_(done)
    return out
