"""gTop-k: a sparse allreduce whose messages never have more than k entries.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
Bandwidth Networks", ICDCS 2019.  Vectors are merged pairwise up a binomial tree, and each merge
keeps only the k largest sums; the root sends the result back down the tree: 2 log2 P rounds.

The result is not the k largest of all sums: a place that is small in each part is dropped on the
way, however large its sum would have become.

Differs from the paper in: nothing is lost.  There, every rank clears what it sent if the index is
in the result; but a part of it may have been dropped in one branch while the index survived in
another.  Here the rank that merges keeps what it drops, partial sums of others' entries included.
Any number of ranks; among equal magnitudes the lower index is kept; what is not finite is larger
than all that is.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from hvd_compress.base import Sparse
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.communicator import Channel, Communicator
from hvd_compress.mpi.sparse import Comm, Reduced, reduced, run
from hvd_compress.mpi.sparse_messages import Format, swap
from hvd_compress.mpi.sparse_vectors import largest, pick, take_in
from hvd_compress.mpi.work import Wait
from hvd_compress.wire import sparse_size


def gtop_k_allreduce(
    sparse: Sparse,
    n: int,
    k: int,
    *,
    op: str = "sum",
    comm: Comm = None,
    indices: str = "int32",
) -> Reduced:
    """At most ``k`` of the sums over the ranks, the same bits on all ranks.

    Args:
        sparse, n, comm, indices: as for :func:`.sparse_allreduce`; more than ``k`` entries are cut
            to the largest at the start.
        k: entries of the result and of every message, at most.
        op: "sum" or "mean".

    ``dropped`` is what this rank left out when it merged.  Over all ranks, what they brought adds
    up to the sum and what they dropped, up to rounding.  Partial sums of float16 are float32.

    Raises:
        ConfigError, UnsupportedError: an option or an array that does not fit.
        MismatchError: ranks differ in n, k, dtype or options.
        PayloadError: a message was damaged on its way.
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ConfigError(f"k must be an integer, 1 or more; got {k!r}")
    communicator = Communicator.of(comm)
    mine, like = take_in(sparse, n)
    form = Format.of(n, mine.values.dtype.name, None, indices, op, communicator.size)
    total, dropped = run(
        communicator,
        f"gtop_k_allreduce({form}, k={k})",
        lambda: _tree(communicator.channel(), mine, k, form),
    )
    return reduced(form, total, dropped, like)


def _tree(
    channel: Channel, mine: Sparse, k: int, form: Format
) -> Generator[Wait, None, tuple[Sparse, list[Sparse]]]:
    rank, size, n = channel.rank, channel.size, form.n
    rounds = (size - 1).bit_length()
    dropped: list[Sparse] = []

    def keep(*parts: Sparse) -> Sparse:
        total: Any = form.add_up(parts, n, form.wide)
        is_kept = largest(total.values, k)
        dropped.append(pick(total, ~is_kept))
        return pick(total, is_kept)

    total = keep(mine)
    limit = sparse_size(min(k, n), n, form.wide)
    children: list[int] = []
    for step in range(rounds):
        peer = rank ^ (1 << step)
        if peer < rank:
            up = {peer: form.encode(total, n)}
            yield from swap(channel, up, [], limit, "gTop-k up the tree", (step + 1, rounds))
            break
        if peer < size:
            frames = yield from swap(
                channel, {}, [peer], limit, "gTop-k up the tree", (step + 1, rounds)
            )
            theirs: Any = form.decode(frames[peer], n, form.wide, peer)
            total = keep(total, theirs)
            children.append(peer)

    if rank == 0:
        frame = form.encode(Sparse(total.indices, form.finish(total.values, form.dtype)), n)
    else:
        parent = rank & (rank - 1)
        frame = (yield from swap(channel, {}, [parent], limit, "gTop-k down the tree"))[parent]
    result: Any = form.decode(frame, n, form.dtype, rank & (rank - 1))
    down = dict.fromkeys(reversed(children), frame)
    yield from swap(channel, down, [], limit, "gTop-k down the tree")
    return result, dropped
