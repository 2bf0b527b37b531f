"""One rank's bytes on every rank.

Short arrays go from the root to all in one round.  Of longer ones the root sends each rank a part,
which this passes on to all others: then the root sends twice the bytes at most, whatever the number
of ranks, and the others share the rest.
"""

from __future__ import annotations

import numpy as np

from hvd_compress.mpi.transport.communicator import Channel, others
from hvd_compress.mpi.transport.point_to_point import exchange
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.sharding import shards_of

#: bytes for which a second round costs more time than it saves
_SHORT = 16 * 1024


def broadcast(channel: Channel, array: np.ndarray, root: int) -> Algorithm:
    """Replace the bytes of ``array`` (1-D, uint8, as long on all ranks) by those of ``root``."""
    rank, size = channel.rank, channel.size
    peers = others(rank, size)
    if array.size <= _SHORT or size == 2:
        outgoing = dict.fromkeys(peers, array) if rank == root else {}
        yield from exchange(channel, outgoing, {} if rank == root else {root: array}, "from root")
        return array
    parts = [array[part] for part in shards_of(array.size, size)]
    outgoing = {peer: parts[peer] for peer in peers} if rank == root else {}
    arriving = {} if rank == root else {root: parts[rank]}
    yield from exchange(channel, outgoing, arriving, "scatter of parts", (1, 2))
    # The root has all parts already.
    outgoing = {peer: parts[rank] for peer in peers if peer != root}
    arriving = {} if rank == root else {peer: parts[peer] for peer in peers}
    yield from exchange(channel, outgoing, arriving, "passing on of parts", (2, 2))
    return array
