"""Quantised allreduce: the exchange of 1-bit SGD (Seide, Fu, Droppo, Li, Yu; Interspeech 2014).

The columns of an array are divided among the ranks, in shards.  Every rank quantises its array and
sends each shard to the shard's owner; the owner decodes them all, adds them up, quantises the sum
and sends it to all.  So arrays are quantised twice.  Each rank keeps its rounding errors in
two residuals that are added before the next quantisation: the worker's, of full size, and the
owner's, of the size of its shard.  Nothing is lost; it is only sent later.

This is the aggregator ``alltoall`` with the codec ``column_means`` or ``linear`` over MPI, with
error feedback and for arrays of any layout.

Each rank sends (P - 1) / P of its quantised array twice; with one bit and columns of 2048 float32
that is 31.03 times less than a dense allreduce.  A ring is not possible: a partial sum of quantised
arrays has more levels than the arrays, and would have to be quantised again on each hop.
DeepSpeed's compressed allreduce quantises twice as well, with one scale for a whole shard.

Differs from the paper in: all frames of a phase are in flight at once; 8 bits are offered too;
NaN and Inf are detected and change no residual.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.base import Context
from hvd_compress.codecs import Codec, column_means, linear
from hvd_compress.codecs.frame import frame_of_damaged
from hvd_compress.coding.shards import Shards
from hvd_compress.errors import ConfigError, PayloadError, UnsupportedError
from hvd_compress.mpi.calls.allreduce import direct_allreduce
from hvd_compress.mpi.dense import alltoall as messages
from hvd_compress.mpi.dense.allgather import gather
from hvd_compress.mpi.dense.running import Comm
from hvd_compress.mpi.transport.arrays import describe, flatten, from_host, to_host
from hvd_compress.mpi.transport.communicator import Channel, Communicator
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.mpi.transport.reduction import Reduction
from hvd_compress.systems.mpi.quantized_state import Plan, QuantizedState

_BITS = (1, 8)


def quantized_allreduce(
    x: Any,
    state: QuantizedState,
    *,
    bits: int = 1,
    op: str = "mean",
    columns: str | int = "first",
    comm: Comm = None,
) -> Any:
    """Reduce an array over all ranks with few bits an element; every rank gets the same bits.

    The result approximates the mean or sum; ``state`` keeps the error for the next calls.

    Args:
        x: an array of floats, as for :func:`allreduce`.  A GPU array is quantised on the host.
        state: the state of this array after the call before; it is changed in place.
        bits: 1, with two means for each column, or 8, with a scale for each column.
        op: "mean" or "sum".
        columns: which elements share their levels.  "first": every index of the first axis is a
            column, so with the weights of ``torch.nn.Linear`` and of convolutions all that is added
            up in one output; "last": every index of the last axis, which is the same for Keras.  A
            number: runs of so many elements, whatever the shape, and the default, 2048, for arrays
            of less than two dimensions.  Shards are whole columns: with fewer columns than ranks
            some ranks own none.  A column of r float32 takes r + 64 bits, so short ones take more
            than they save: give a number for arrays such as (n, 1) or (n, 1, 3, 3).
        comm: ``None`` for all ranks.

    Returns:
        A new array of the kind of ``x``.  If ``x`` has NaN or Inf on any rank, or numbers so large
        that sums of a column are not finite, it is NaN everywhere, and no residual changes on any
        rank.

    Raises:
        UnsupportedError: integers.
        ConfigError: an option is unknown, or the state belongs to another array or to other ranks.
        PayloadError: a message was damaged.  If it was one to an owner, every rank raises this and
            no residual changes; if it was one from an owner, only the receiver does.
        MismatchError, CollectiveTimeout: see :func:`allreduce`.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        if bits not in _BITS:
            raise ConfigError(f"bits={bits!r} is not one of {', '.join(map(str, _BITS))}")
        if op not in ("mean", "sum"):
            raise ConfigError(f"op={op!r} is not one of mean, sum")
        flat = flatten(x)
        if "int" in flat.dtype:
            raise UnsupportedError(f"cannot quantise {flat.dtype}: pass floats, or use allreduce")
        plan = Plan.of(flat.shape, columns)
        rounding = Reduction("sum", flat.dtype, communicator.size)
        total = rounding.scratch(plan.n)
        worker, owner = state.prepare(flat, total.dtype, columns, communicator, plan)
    call = f"quantized_allreduce({describe(flat)}, {op}, bits={bits}, columns={columns})"
    communicator.agree(call)
    with np.errstate(over="ignore"):
        rounding.widen(plan.flatten(to_host(flat.array).reshape(flat.shape)), total)
        total += plan.flatten(worker)
    if not np.isfinite(total).all():
        total[:] = np.nan  # for the owners of all shards to see

    codec = column_means(plan.length) if bits == 1 else linear(bits, plan.length)
    algorithm = _exchange(communicator.channel(), total, owner, plan, codec)
    mean, sent, left = communicator.run(call, algorithm)[0]
    # What the owner keeps is reckoned from what the ranks get, rounded to their dtype.
    factor = communicator.size if op == "mean" else 1
    result = mean if op == "mean" else mean * communicator.size
    out, rounded = rounding.scratch_of_dtype(plan.n), np.empty_like(result)
    rounding.finish(result, out)
    rounding.widen(out, rounded)
    if np.isfinite(rounded).all():
        own = plan.shards(communicator.size)[communicator.rank]
        left += factor * (result - rounded)[own]
        state.worker, state.owner = plan.restore(total - sent), left
    else:
        rounding.finish(np.full_like(result, np.nan), out)
    done = np.ascontiguousarray(plan.restore(out)).reshape(-1)
    return flat.give_back(from_host(done, flat.array))


def consolidate(state: QuantizedState, *, comm: Comm = None) -> None:
    """Give every rank the same state, without an owner's residual; this is a collective.

    Each rank adds its owner's residual to the worker's, and all ranks take over the mean of these.
    This keeps the total that has not been sent, so the state is also right for another number of
    ranks: save it on one rank, load it on all.

    Args:
        state: changed in place.
        comm: the communicator; ``None`` for all ranks.

    Raises: what :func:`allreduce` does.
    """
    state.fold()
    if state.worker is not None:
        direct_allreduce(state.worker, op="mean", out=state.worker, comm=comm)


def _exchange(
    channel: Channel, x: np.ndarray, owner: np.ndarray, plan: Plan, codec: Codec
) -> Algorithm:
    """Average the flat ``x``, to which the worker's residual was added.

    Returns the mean, the part of ``x`` that this rank has sent, and the owner's next residual.

    A rank always completes both rounds, since the others wait for it.  An owner that received a
    damaged message therefore sends a frame without values in place of its sum.
    """
    shard = plan.shards(channel.size)[channel.rank]
    residual = np.zeros_like(x)
    residual[shard] = owner
    context = Context(rank=channel.rank, size=channel.size)
    shards = Shards(plan.shards(channel.size), context, x.size, x.dtype)
    *payloads, sent = shards.encode(codec, 0, x, residual)
    error = None

    arrived = yield from messages.alltoall(channel, payloads, phase="quantised reduce-scatter")
    try:
        frame, left = shards.add_up(codec, 0, residual, *arrived)
    except PayloadError as problem:
        error, frame = problem, frame_of_damaged(codec, shard.stop - shard.start, x.dtype)
    arrived = yield from gather(channel, frame, shards.sizes(codec), "quantised allgather")
    if error is not None:
        raise error
    (total,) = shards.decode(codec, *arrived)
    return total / channel.size, sent, left[shard]
