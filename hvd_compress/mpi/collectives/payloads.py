"""Bytes of ranks on other ranks: from all to all, from one to all, and between neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_compress.mpi.transport.channel import Channel, exchange
from hvd_compress.mpi.transport.progress import Algorithm
from hvd_compress.sharding import shards_of

#: bytes of a broadcast for which a second round costs more time than it saves
_SHORT = 16 * 1024


def alltoall(channel: Channel, messages: Sequence[np.ndarray], equal_sizes: bool) -> Algorithm:
    """Send each rank its entry of ``messages`` (1-D, uint8), and return the messages that the ranks
    have for this one, in rank order.  ``equal_sizes`` is a promise that all ranks have equally many
    bytes for the same rank, so that sizes need not be exchanged."""
    own, outgoing = messages[channel.rank], {}
    for peer in channel.peers:
        outgoing[peer] = messages[peer]
    like = own if equal_sizes else None
    arrived = yield from exchange(channel, outgoing, channel.peers, "payloads", like=like)
    arrived[channel.rank] = own
    return [message for _, message in sorted(arrived.items())]


def gather(channel: Channel, message: np.ndarray, equal_sizes: bool = False) -> Algorithm:
    """Return every rank's ``message``, in rank order: an all-to-all of the same for everybody."""
    return alltoall(channel, channel.size * [message], equal_sizes)


def broadcast(channel: Channel, array: np.ndarray, root: int) -> Algorithm:
    """Replace the bytes of ``array`` (1-D, uint8, as long on all ranks) by those of ``root``.

    Short arrays go from the root to all in one round.  A longer one the root sends in parts, one to
    each rank, which passes it on to all others.  Then the root sends twice the bytes at most,
    whatever the number of ranks, and the others share the rest.
    """
    rank, size = channel.rank, channel.size
    peers = channel.peers
    if array.size <= _SHORT or size == 2:
        outgoing = dict.fromkeys(peers, array) if rank == root else {}
        yield channel.exchange({} if rank == root else {root: array}, outgoing, "from root")
        return array
    parts = [array[part] for part in shards_of(array.size, size)]
    outgoing = {peer: parts[peer] for peer in peers} if rank == root else {}
    arriving = {} if rank == root else {root: parts[rank]}
    yield channel.exchange(arriving, outgoing, "scatter of parts", (1, 2))
    # The root has all parts already.
    outgoing = {peer: parts[rank] for peer in peers if peer != root}
    arriving = {} if rank == root else {peer: parts[peer] for peer in peers}
    yield channel.exchange(arriving, outgoing, "passing on of parts", (2, 2))
    return array
