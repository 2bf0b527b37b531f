"""Split and allgather: SparCML's SSAR_ and DSAR_Split_allgather (Renggli et al., SC 2019).

The n elements are split into P regions.  Every rank sends each region's entries to the region's
owner, which adds them up in rank order.  Then all owners send their sums to all ranks.  A rank
receives k (P - 1) / P entries at first, and then the union of all entries outside its region.

Two things differ from the paper.  Each owner decides for its own region whether the sum is sent
sparse or dense.  All messages of a phase are in flight at once.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import numpy as np

from hvd_compress.base import Sparse
from hvd_compress.meetings.sparse_vectors import Vector, densify, join
from hvd_compress.mpi.collectives.sparse_allgather import gather
from hvd_compress.mpi.collectives.sparse_messages import Format, Summed, entries_of, with_values
from hvd_compress.mpi.transport.channel import Channel, exchange
from hvd_compress.mpi.transport.progress import Wait
from hvd_compress.requests.sparse import cut
from hvd_compress.sharding import bounds_of
from hvd_compress.wire import sparse_size


def split_allgather(channel: Channel, mine: Sparse, form: Format) -> Summed:
    """Return the result, and what rounding took off this rank's region."""
    bounds = bounds_of(form.n, channel.size)
    parts = yield from to_owners(channel, mine, bounds, form)
    start, stop = bounds[channel.rank : channel.rank + 2]
    done, lost = form.settle(form.add_up(parts, stop - start, form.wire))
    regions = yield from from_owners(channel, done, bounds, form)
    return assemble(regions, bounds, form), Sparse(lost.indices + start, lost.values)


def to_owners(
    channel: Channel, mine: Sparse, bounds: Sequence[int], form: Format
) -> Generator[Wait, None, list[Vector]]:
    """Return every rank's entries in this rank's region, in rank order, indices counted from its
    start."""
    rank, peers = channel.rank, channel.peers
    parts = cut(mine, bounds)
    frames = {peer: form.encode(parts[peer], bounds[peer + 1] - bounds[peer]) for peer in peers}
    length = bounds[rank + 1] - bounds[rank]
    limit = sparse_size(length, length, form.wire)
    arriving = yield from exchange(channel, frames, peers, "entries to their owners", limit=limit)
    return [
        parts[r] if r == rank else form.decode(arriving[r], length, form.wire, r)
        for r in range(channel.size)
    ]


def from_owners(
    channel: Channel, mine: Vector, bounds: Sequence[int], form: Format
) -> Generator[Wait, None, list[Vector]]:
    """Return all regions, in the dtype of the result."""
    lengths = [bounds[i + 1] - bounds[i] for i in range(channel.size)]
    regions = yield from gather(channel, mine, lengths, form, "sums from their owners")
    return [with_values(region, lambda x: x.astype(form.dtype)) for region in regions]


def assemble(regions: Sequence[Vector], bounds: Sequence[int], form: Format) -> Vector:
    lengths = [bounds[i + 1] - bounds[i] for i in range(len(regions))]
    counts = [x.indices.size if isinstance(x, Sparse) else np.count_nonzero(x) for x in regions]
    if form.is_full(int(sum(counts)), form.n, form.dtype):
        pairs = zip(regions, lengths, strict=True)
        return np.concatenate([densify(x, m) if isinstance(x, Sparse) else x for x, m in pairs])
    return join([entries_of(region) for region in regions], bounds)
