"""Quantised allreduce: the exchange of 1-bit SGD (Seide, Fu, Droppo, Li, Yu; Interspeech 2014).

The columns of an array are dealt out to the ranks in shards.  Every rank quantises its array and
sends each shard to the shard's owner; the owner decodes them all, adds them up, quantises the sum
and sends it to all.  So arrays are quantised at two points, and what rounding takes away stays at
both, in two residuals that are added before the next quantisation: the worker's, of full size, and
the owner's, of the size of its shard.  Nothing is lost, it only comes later.

Each rank sends (P - 1) / P of its quantised array twice; with one bit and columns of 2048 float32
that is 31.03 times less than a dense allreduce.  A ring cannot do it: a partial sum of quantised
arrays is not one of few values any more, and would have to be quantised again on each hop.
DeepSpeed's compressed allreduce has the same two levels, with one scale for a whole shard.

Differs from the paper in: all frames of a phase are under way at once; 8 bits are offered too;
NaN and Inf are seen and change no residual.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.errors import ConfigError, PayloadError, UnsupportedError
from hvd_compress.mpi.dense.allreduce import Comm, direct_allreduce
from hvd_compress.mpi.quantized_frame import (
    DAMAGED,
    FINE,
    NOT_FINITE,
    QUANTISERS,
    decode_frame,
    encode_frame,
    frame_size,
)
from hvd_compress.mpi.quantized_state import Plan, QuantizedState
from hvd_compress.mpi.transport.arrays import describe, flatten
from hvd_compress.mpi.transport.communicator import Channel, Communicator, others
from hvd_compress.mpi.transport.progress import Algorithm, Wait
from hvd_compress.mpi.transport.reduction import Reduction


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

    The result is near the mean or sum; what is missing waits in ``state`` for the next calls.

    Args:
        x: like that of :func:`allreduce`, of floats.  On a GPU it is quantised on the host.
        state: of this array, from the call before; changed in place.
        bits: 1, two means for each column, or 8, a scale for each column.
        op: "mean" or "sum".
        columns: what shares its levels.  "first": every index of the first axis is a column, so
            with the weights of ``torch.nn.Linear`` and of convolutions what leads to one output;
            "last": every index of the last axis, which is the same for Keras.  A number: runs of
            so many elements, whatever the shape, and the default, 2048, for arrays of less than
            two dimensions.  Shards are whole columns: with fewer columns than ranks some ranks own
            none.  A column of r float32 travels as r + 64 bits, so short ones are dear: give
            a number for arrays such as (n, 1) or (n, 1, 3, 3).
        comm: ``None`` for all ranks.

    Returns:
        A new array of the kind of ``x``.  If ``x`` has NaN or Inf on any rank, or numbers so large
        that sums of a column are, it is NaN everywhere, and no residual changes on any rank.

    Raises:
        UnsupportedError: integers.
        ConfigError: an option is unknown, or the state belongs to another array or to other ranks.
        PayloadError: a message was damaged.  If it was on its way to an owner, every rank raises
            this and no residual changes; if on its way back, only the receiver does.
        MismatchError, CollectiveTimeout: see :func:`allreduce`.
    """
    if bits not in QUANTISERS:
        raise ConfigError(f"bits={bits!r} is not one of {', '.join(map(str, QUANTISERS))}")
    if op not in ("mean", "sum"):
        raise ConfigError(f"op={op!r} is not one of mean, sum")
    communicator = Communicator.of(comm)
    flat = flatten(x)
    if "int" in flat.dtype:
        raise UnsupportedError(f"cannot quantise {flat.dtype}: pass floats, or use allreduce")
    plan = Plan.of(flat.shape, columns)
    reduce = Reduction(op, flat.dtype, communicator.size)
    ours = _to_host(flat.array)
    total = reduce.scratch(plan.n)
    worker, owner = state.prepare(flat, total.dtype, columns, communicator, plan)
    call = f"quantized_allreduce({describe(flat)}, {op}, bits={bits}, columns={columns})"
    communicator.agree(call)
    with np.errstate(over="ignore"):
        reduce.widen(plan.flatten(ours.reshape(flat.shape)), total)
        total += plan.flatten(worker)
    out = reduce.scratch_of_dtype(plan.n)
    algorithm = _exchange(communicator.channel(), total, owner, out, reduce, plan, bits)
    remainder = communicator.run(call, algorithm)[0]
    if remainder is None:
        reduce.finish(np.full_like(total, np.nan), out)
    else:
        state.worker, state.owner = plan.restore(total), remainder
    done = np.ascontiguousarray(plan.restore(out)).reshape(-1)
    return flat.give_back(_from_host(done, flat.array))


def consolidate(state: QuantizedState, *, comm: Comm = None) -> None:
    """Give every rank the same state, without an owner's residual: a collective.

    Each rank folds its owner's residual into the worker's, and the mean of these over the ranks
    becomes everyone's.  What waits for the mean is what it was, so it is also right for another
    number of ranks: save it on one rank, load it on all.
    """
    state.fold()
    if state.worker is not None:
        direct_allreduce(state.worker, op="mean", out=state.worker, comm=comm)


def _exchange(
    channel: Channel,
    x: np.ndarray,
    residual: np.ndarray,
    out: np.ndarray,
    reduction: Reduction,
    plan: Plan,
    bits: int,
) -> Algorithm:
    """Reduce the flat ``x``, with the worker's residual in it, into ``out``.

    What remains of ``x`` is the next residual of the worker.  Returns that of the owner, or
    ``None`` if some rank had NaN or Inf.

    A rank never leaves before both phases are over, whatever it finds: the others wait for it.
    Every rank hears the status of all owners, and an owner's is the worst of what it was sent; so
    all ranks come to the same conclusion.
    """
    rank, size, length = channel.rank, channel.size, plan.length
    shards = plan.shards(size)
    lengths = [shard.stop - shard.start for shard in shards]
    owners = [peer for peer in others(rank, size) if lengths[peer]]
    workers = others(rank, size) if lengths[rank] else []
    error: PayloadError | None = None

    def decode(frame: np.ndarray, sender: int, owner: int) -> tuple[np.ndarray | None, int]:
        nonlocal error
        name = f"rank {sender}"
        try:
            return decode_frame(frame, lengths[owner], length, bits, x.dtype, sender=name)
        except PayloadError as problem:
            error = error or problem
            return None, DAMAGED

    def frames(owner: int) -> np.ndarray:
        return np.empty(frame_size(lengths[owner], length, bits, x.dtype), np.uint8)

    arriving = {peer: frames(rank) for peer in workers}
    messages = [channel.receive(frame, peer) for peer, frame in arriving.items()]
    for owner in [*owners, rank]:
        part = x[shards[owner]]
        frame, status = encode_frame(part, length, bits)
        if status == FINE:
            part -= decode(frame, rank, owner)[0]
        if owner == rank:
            arriving[rank] = frame
        else:
            messages.append(channel.send(frame, owner))
    yield Wait(messages, "quantised reduce-scatter")

    # In the order of the ranks: the sum does not depend on who came first.
    total, worst = np.zeros_like(residual), FINE
    for sender in range(size) if lengths[rank] else ():
        values, status = decode(arriving[sender], sender, rank)
        worst = max(worst, status)
        if values is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                total += values
    with np.errstate(over="ignore", invalid="ignore"):
        total += residual
    frame, worst = encode_frame(total, length, bits, worst)
    if worst == FINE:
        # What is left is reckoned from what the ranks get, rounded to their dtype.
        values, _ = decode(frame, rank, rank)
        assert values is not None
        mine = out[shards[rank]]
        reduction.finish(values, mine)
        reduction.widen(mine, values)
        with np.errstate(over="ignore"):
            total -= values * size if reduction.op == "mean" else values
        if not np.isfinite(total).all():  # too large for half precision
            frame, worst = encode_frame(total, length, bits, NOT_FINITE)

    arriving = {peer: frames(peer) for peer in owners}
    messages = [channel.receive(frame, peer) for peer, frame in arriving.items()]
    messages += [channel.send(frame, peer) for peer in workers]
    yield Wait(messages, "quantised allgather")

    for owner, frame in arriving.items():
        values, status = decode(frame, owner, owner)
        worst = max(worst, status)
        if status == DAMAGED and error is None:
            error = PayloadError(f"rank {owner} got a damaged payload: see its message")
        if values is not None:
            reduction.finish(values, out[shards[owner]])
    if error is not None:
        raise error
    return total if worst == FINE else None


def _to_host(array: Any) -> np.ndarray:
    """A flat array in host memory; bfloat16 as uint16."""
    if isinstance(array, np.ndarray):
        return array
    host = array.detach().cpu()
    if str(host.dtype) == "torch.bfloat16":
        import torch

        return host.view(torch.int16).numpy().view(np.uint16)
    return host.numpy()


def _from_host(array: np.ndarray, like: Any) -> Any:
    """The way back, to the device of ``like``."""
    if isinstance(like, np.ndarray):
        return array
    import torch

    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(like.device)
    return torch.from_numpy(array).to(like.device)
