"""A message from each rank to each other, or to a partner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvd_compress.mpi.dense.allgather import check_sizes
from hvd_compress.mpi.transport.communicator import Channel, others
from hvd_compress.mpi.transport.progress import Algorithm, Wait


def alltoall(
    channel: Channel,
    messages: Sequence[np.ndarray],
    equal_sizes: bool = True,
    phase: str = "payloads",
) -> Algorithm:
    """Send each rank its entry of ``messages`` (1-D, uint8), and return the messages that the ranks
    have for this one.  ``equal_sizes`` is a promise that all ranks have equally many bytes for the
    same rank, so that sizes need not be exchanged."""
    rank = channel.rank
    peers = others(channel.rank, channel.size)
    sizes = np.full(channel.size, messages[rank].nbytes, np.int64)
    if not equal_sizes:
        own = np.array([message.nbytes for message in messages], np.int64)
        lengths = [channel.receive(sizes[peer : peer + 1], peer) for peer in peers]
        lengths += [channel.send(own[peer : peer + 1], peer) for peer in peers]
        yield Wait(lengths, "sizes of payloads")
        check_sizes(sizes)
    arriving = [np.empty(size, np.uint8) for size in sizes]
    arriving[rank] = messages[rank]
    under_way = [channel.receive(arriving[peer], peer) for peer in peers]
    under_way += [channel.send(messages[peer], peer) for peer in peers]
    yield Wait(under_way, phase)
    return arriving


def swap(channel: Channel, messages: Mapping[int, np.ndarray]) -> Algorithm:
    """Send ``messages`` (1-D, uint8, by partner), and return the partners' messages by partner.
    Each partner has equally many bytes for this rank."""
    arriving = {peer: np.empty_like(message) for peer, message in messages.items()}
    under_way = [channel.receive(theirs, peer) for peer, theirs in arriving.items()]
    under_way += [channel.send(message, peer) for peer, message in messages.items()]
    yield Wait(under_way, "payloads of partners")
    return arriving
