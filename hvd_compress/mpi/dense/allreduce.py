"""Dense allreduce: one function for each algorithm, and one that chooses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from hvd_compress.backends import halves
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.dense.direct_allreduce import direct
from hvd_compress.mpi.dense.halving_doubling import REMAINDERS, halving_doubling
from hvd_compress.mpi.dense.native import at_once, native
from hvd_compress.mpi.dense.plans import LARGEST, known_plan, plan_of
from hvd_compress.mpi.dense.recursive_doubling import recursive_doubling
from hvd_compress.mpi.dense.ring import ring
from hvd_compress.mpi.transport.arrays import HALVES, Flat, describe, flatten, from_host, to_host
from hvd_compress.mpi.transport.communicator import Channel, Communicator, nbytes
from hvd_compress.mpi.transport.progress import Work
from hvd_compress.mpi.transport.reduction import Reduction, reduction
from hvd_compress.mpi.tuning.measuring import model_of
from hvd_compress.sharding import shards_of

Comm = MPI.Comm | Communicator | None
Algorithm = Callable[..., Any]

ALGORITHMS: dict[str, Algorithm] = {
    "direct": direct,
    "halving_doubling": halving_doubling,
    "mpi": native,
    "recursive_doubling": recursive_doubling,
    "ring": ring,
}
#: with the form of one that has a function only
_ALL: dict[str, Algorithm] = {
    **ALGORITHMS,
    "halving_doubling, fold": functools.partial(halving_doubling, remainder="fold"),
}
#: bytes of one message, and the number of blocks of an array that are in flight at once
CHUNK, DEPTH = 512 * 1024, 4
#: kinds of arrays whose algorithm is remembered
_KINDS = 4096


def allreduce(
    x: Any,
    *,
    op: str = "sum",
    algorithm: str = "auto",
    out: Any = None,
    comm: Comm = None,
    chunk: int = CHUNK,
) -> Any:
    """Reduce an array over all ranks; every rank gets the same bits, except that NaNs may differ in
    theirs where MPI's own allreduce adds up.

    Args:
        x: a NumPy array, a torch tensor, or a GPU array with DLPack, of any shape, which is the
            same on all ranks; float16, bfloat16, float32, float64 or integers.  Half precisions
            are added in float32 and rounded once.
        op: "sum", "mean" (floats only) or "max" (NaN counts as largest).
        algorithm: "ring", "halving_doubling", "recursive_doubling", "direct", "mpi" (MPI's own), or
            "auto": the one that a model measured on this communicator expects to be fastest, see
            :class:`.CostModel`.
        out: the array for the result, of the shape and dtype of ``x``; ``out=x`` works in place,
            and ``None`` makes a new array.
        comm: the communicator; ``None`` for all ranks.
        chunk: the bytes of a message.  The array is sent in blocks, so that one is added while
            others are on the wire; this takes a few chunks of memory in addition to the result.

    Returns:
        ``out``, or a new array of the kind of ``x``.

    Raises:
        UnsupportedError: a dtype that cannot be reduced.
        MismatchError: ranks differ in shape, dtype or options (found by the first calls' check).
        CollectiveTimeout: a rank does not answer.
    """
    communicator = Communicator.of(comm)
    kind = name = None
    if type(x) is np.ndarray and not communicator.checks:
        # What a small array takes is mostly Python, and a kind seen before takes little of it.
        kind = x.dtype, x.shape, op, algorithm, chunk
        name, is_short = communicator.choices.get(kind, (None, False))
        if name is not None and is_short:
            target = np.empty(x.shape, x.dtype) if out is None else out
            if _is_plain(x, target) and _at_once(x, target, op, name, communicator):
                return target
    with communicator.told():
        if name is None and algorithm != "auto" and algorithm not in _ALL:
            raise ConfigError(
                f"algorithm={algorithm!r} is not one of auto, {', '.join(ALGORITHMS)}"
            )
        check_chunk(chunk)
        flat = flatten(x)
        target = target_of(out, x, flat)
    cut = "" if chunk == CHUNK else f", chunk={chunk}"
    communicator.agree(Call(flat, op, communicator.named(algorithm) + cut))
    if name is None:
        name = algorithm
        if name == "auto":
            name = model_of(communicator).fastest(nbytes(flat.array), flat.dtype)
    _reduce(_ALL[name], name, flat, target.array, op, communicator, chunk)
    done = put(target, out)
    if kind is not None:
        is_mpi = name == "mpi" and 0 < flat.array.nbytes <= 16 * chunk
        is_short = is_mpi or _is_repeated(_ALL[name], flat, communicator, chunk)
        _remember(communicator.choices, kind, name, is_short and flat.dtype not in HALVES)
    return done


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


def _at_once(x: np.ndarray, out: np.ndarray, op: str, name: str, comm: Communicator) -> bool:
    """Reduce with next to nothing around it, and return whether that could be done."""
    if name == "mpi":
        at_once(comm, x, out, op, lambda: Call(x, op, name))
        return True
    plan = known_plan(comm, (name, op, x.dtype, x.size))
    if plan is not None:
        plan.run(x.reshape(-1), out.reshape(-1), Call(x, op, name))
    return plan is not None


def _remember(
    choices: dict[Any, tuple[str, bool]], kind: tuple[Any, ...], name: str, is_short: bool
) -> None:
    if len(choices) >= _KINDS:
        choices.clear()
    choices[kind] = name, is_short


def ring_allreduce(
    x: Any, *, op: str = "sum", out: Any = None, comm: Comm = None, chunk: int = CHUNK
) -> Any:
    """Run :func:`allreduce` around a ring: 2 (P - 1) rounds, each rank sends 2 n (P - 1) / P bytes.

    The order of additions of an element depends on its place in the array.
    """
    return allreduce(x, op=op, algorithm="ring", out=out, comm=comm, chunk=chunk)


def halving_doubling_allreduce(
    x: Any,
    *,
    op: str = "sum",
    out: Any = None,
    comm: Comm = None,
    chunk: int = CHUNK,
    remainder: str = "binary_blocks",
) -> Any:
    """Run :func:`allreduce` by recursive halving and doubling: 2 log2 P rounds.

    Args:
        remainder: what happens if P is no power of two: "binary_blocks" or "fold".
    """
    if remainder not in REMAINDERS:
        raise ConfigError(f"remainder={remainder!r} is not one of {', '.join(REMAINDERS)}")
    name = "halving_doubling, fold" if remainder == "fold" else "halving_doubling"
    return allreduce(x, op=op, algorithm=name, out=out, comm=comm, chunk=chunk)


def recursive_doubling_allreduce(
    x: Any, *, op: str = "sum", out: Any = None, comm: Comm = None, chunk: int = CHUNK
) -> Any:
    """Run :func:`allreduce` by recursive doubling: log2 P rounds, each rank sends n log2 P bytes;
    elements are always added in the same order."""
    return allreduce(x, op=op, algorithm="recursive_doubling", out=out, comm=comm, chunk=chunk)


def direct_allreduce(
    x: Any, *, op: str = "sum", out: Any = None, comm: Comm = None, chunk: int = CHUNK
) -> Any:
    """Run :func:`allreduce` with two rounds of messages from each rank to each other; elements are
    always added in the order of the ranks."""
    return allreduce(x, op=op, algorithm="direct", out=out, comm=comm, chunk=chunk)


class Call(NamedTuple):
    """What the user called; the text is made when somebody wants to read it."""

    x: Any
    op: str
    algorithm: str

    def __str__(self) -> str:
        x = self.x if isinstance(self.x, Flat) else flatten(self.x)
        return f"allreduce({describe(x)}, {self.op}, {self.algorithm})"


def check_chunk(chunk: int) -> None:
    """Raise ``ConfigError`` unless messages may have so many bytes."""
    if chunk < 64:
        raise ConfigError(f"chunk={chunk} bytes: at least 64")


def _reduce(
    algorithm: Algorithm,
    name: str,
    flat: Flat,
    result: Any,
    op: str,
    comm: Communicator,
    chunk: int,
) -> None:
    call = Call(flat, op, name)
    if not _is_repeated(algorithm, flat, comm, chunk):
        start(comm, call, algorithm, flat, result, op, chunk).wait()
        return
    plan, host = plan_of(comm, name, algorithm, op, flat), to_host(flat.array)
    if host is flat.array:
        plan.run(host, result, call)
    else:
        plan.run(host, host, call)
        result.copy_(from_host(host, result))


def _is_repeated(algorithm: Algorithm, flat: Flat, comm: Communicator, chunk: int) -> bool:
    """Return whether arrays of this kind have a plan, wherever a rank has them."""
    if algorithm is native or comm.size == 1:
        return False
    return 0 < nbytes(flat.array) <= min(LARGEST, chunk)


def target_of(out: Any, x: Any, flat: Flat) -> Flat:
    """Return the array that the result is made in; ``flat`` is ``x`` flat.

    Raises:
        ConfigError: ``out`` cannot be written, or differs from ``x`` in shape or dtype.
    """
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ConfigError("out is read-only: pass an array that can be written, or out=None")
    target = flat if out is x else _target(out, flat)
    if target is not flat and _overlap(target.array, flat.array):
        # A view of the whole of x is x.
        is_x = is_same(target.array, flat.array)
        target = flat if is_x else _target(None, flat)
    return target


def put(target: Flat, out: Any) -> Any:
    """Return the result that was made in ``target``, in ``out`` or as a new array if that is
    ``None``."""
    done = target.give_back(target.array)
    return done if out is None else _assign(out, done)


def start(
    comm: Communicator,
    call: object,
    algorithm: Algorithm,
    flat: Flat,
    out: Any,
    op: str,
    chunk: int = CHUNK,
    channel: Callable[[], Channel] | None = None,
) -> Work:
    """Start the allreduce of a flat array, and return it as work under way; ``channel`` opens a
    channel for each block.

    A float32 array of a half precision is sent in that: blocks are rounded on their way.
    """
    channel = channel or comm.channel
    x, reduce = flat.array, reduction(op, flat, comm.size)
    itemsize = nbytes(x[:1]) or 1
    is_rounded = reduce.widens and itemsize == 4
    if comm.size == 1 and is_rounded:
        halves.narrow(x, half := reduce.scratch_of_dtype(len(x)))
        halves.widen(half, out)
    elif comm.size == 1 and out is not x:
        out[:] = x
    if comm.size == 1 or not len(x):
        return Work(comm, call, ())
    if is_rounded:
        itemsize = 2
    per_block = max(1, chunk // itemsize) * comm.size
    if algorithm is native:
        # The same on ranks that reduce in place and on those that do not: every block is a call.
        per_block = max(1, 16 * chunk // itemsize)
    elif algorithm is recursive_doubling:
        per_block = max(1, chunk // itemsize)
    elif algorithm not in (ring, direct):
        per_block = max(1, 2 * chunk // itemsize)  # the first message is half of a block
    blocks = shards_of(len(x), -(-len(x) // per_block))
    if is_rounded:
        algorithm = functools.partial(_rounded, algorithm)
    return Work(
        comm,
        call,
        [
            # A view of its own is not the same object, but in place is in place.
            algorithm(channel(), part := x[block], part if out is x else out[block], reduce)
            for block in blocks
        ],
        DEPTH,
    )


def _rounded(
    algorithm: Algorithm, channel: Channel, x: np.ndarray, out: np.ndarray, reduction: Reduction
) -> Any:
    """Reduce float32 in a half precision."""
    half = reduction.scratch_of_dtype(len(x))
    halves.narrow(x, half, threads=1)
    yield from algorithm(channel, half, half, reduction)
    halves.widen(half, out, threads=1)
    reduction.give_back_of_dtype(half)


def _target(out: Any, like: Flat) -> Flat:
    """Return the array that the result is made in: ``out`` itself where that is possible."""
    if out is None:
        array = like.array
        fresh = (
            np.empty_like(array) if isinstance(array, np.ndarray) else array.new_empty(len(array))
        )
        return like._replace(array=fresh)
    target = flatten(out)
    if isinstance(target.array, np.ndarray) != isinstance(like.array, np.ndarray):
        raise ConfigError("out and x must be on the same device")
    if (target.dtype, target.shape) != (like.dtype, like.shape):
        raise ConfigError(
            f"out is {describe(target)} and x is {describe(like)}: they must be alike"
        )
    return target


def is_same(x: Any, y: Any) -> bool:
    """Return whether flat arrays are the same memory."""
    if isinstance(x, np.ndarray):
        return isinstance(y, np.ndarray) and len(x) > 0 and x.ctypes.data == y.ctypes.data
    return x.data_ptr() == y.data_ptr()


def _overlap(x: Any, y: Any) -> bool:
    if isinstance(x, np.ndarray):
        return isinstance(y, np.ndarray) and np.may_share_memory(x, y)
    return is_same(x, y)


def _assign(out: Any, done: Any) -> Any:
    """Put the result into ``out``, unless it was made there."""
    if isinstance(out, np.ndarray):
        if not np.may_share_memory(out, done):
            out[...] = done
    elif not is_same(out, done):
        out.detach().copy_(done)
    return out
