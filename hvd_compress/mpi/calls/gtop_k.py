"""gTop-k for sparse vectors: an allreduce whose messages never have more than k entries.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
Bandwidth Networks", ICDCS 2019.  This carries the exchange of
:class:`hvd_compress.aggregators.merging.Merging`, of which the method ``GTopK`` is made, over MPI;
the algorithm, and how it differs from the paper, are described there and in
:class:`hvd_compress.blocks.gtop_k`.

The result is not the k largest of all sums: an element that is small on each rank is dropped in a
merge, however large its sum would have become.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np

from hvd_compress.aggregators.merging import Merging
from hvd_compress.base import Sparse
from hvd_compress.coding.sparse_vectors import contains, largest, pick, take_in
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.sparse.messages import Format
from hvd_compress.mpi.sparse.running import Comm, Reduced, reduced, run
from hvd_compress.mpi.transport.communicator import Channel, Communicator
from hvd_compress.mpi.transport.point_to_point import exchange_open
from hvd_compress.mpi.transport.progress import Wait


def gtop_k_allreduce(
    sparse: Sparse,
    n: int,
    k: int,
    *,
    op: str = "sum",
    comm: Comm = None,
    indices: str = "int32",
) -> Reduced:
    """Return about the ``k`` largest sums over the ranks; all ranks get the same bits.

    Args:
        sparse, n, comm, indices: as for :func:`.sparse_allreduce`; more than ``k`` entries are cut
            to the largest at the start.
        k: the largest number of entries of the result and of every message.
        op: "sum" or "mean".

    ``dropped`` holds this rank's entries that are not in the total.  Over all ranks, the vectors
    passed in add up to the total plus what was dropped, up to rounding.  Partial sums of float16
    are float32.

    Raises:
        ConfigError, UnsupportedError: an option or an array that does not fit.
        MismatchError: ranks differ in n, k, dtype or options.
        PayloadError: a message was damaged on its way.
    """
    communicator = Communicator.of(comm)
    with communicator.told():
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise ConfigError(f"k must be an integer, 1 or more; got {k!r}")
        mine, like = take_in(sparse, n)
        form = Format.of(n, mine.values.dtype.name, indices=indices, op=op, size=communicator.size)
    merging = Merging(
        communicator.rank, communicator.size, form.n, min(int(k), form.n), form.wide, codec=indices
    )
    total, sent = run(
        communicator,
        f"gtop_k_allreduce({form}, k={k})",
        lambda: _merge(communicator.channel(), mine, merging),
    )
    total = Sparse(total.indices, form.finish(total.values, form.dtype))
    return reduced(form, total, [pick(mine, ~contains(sent, mine.indices))], like)


def _merge(
    channel: Channel, mine: Sparse, merging: Merging
) -> Generator[Wait, None, tuple[Sparse, Sparse]]:
    """Return the sums, and this rank's entries that are in them."""
    chosen = pick(mine, largest(mine.values, merging.k))
    merge = merging.in_pairs(chosen.indices, chosen.values.astype(merging.dtype))
    step, theirs = 0, None
    while True:
        try:
            request = merge.send(theirs)
        except StopIteration as stop:
            indices, sums, *sent = stop.value
            return Sparse(indices.astype(np.int64), sums), Sparse(*sent)
        step += 1
        frame: np.ndarray = request.payload
        arrived = yield from exchange_open(
            channel,
            dict.fromkeys(request.targets, frame),
            request.sources,
            "gTop-k",
            (step, merging.rounds),
            merging.largest_message,
        )
        theirs = [arrived[source] for source in request.sources]
