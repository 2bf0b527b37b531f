"""A message from each rank to each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_compress.mpi.transport.communicator import Channel, others
from hvd_compress.mpi.transport.point_to_point import exchange, exchange_open
from hvd_compress.mpi.transport.progress import Algorithm


def alltoall(
    channel: Channel,
    messages: Sequence[np.ndarray],
    equal_sizes: bool = True,
    phase: str = "payloads",
) -> Algorithm:
    """Send each rank its entry of ``messages`` (1-D, uint8), and return the messages that the ranks
    have for this one.  ``equal_sizes`` is a promise that all ranks have equally many bytes for the
    same rank, so that sizes need not be exchanged."""
    rank, peers = channel.rank, others(channel.rank, channel.size)
    outgoing = {peer: messages[peer] for peer in peers}
    if equal_sizes:
        buffers = {peer: np.empty_like(messages[rank]) for peer in peers}
        arrived = yield from exchange(channel, outgoing, buffers, phase)
    else:
        arrived = yield from exchange_open(channel, outgoing, peers, phase)
    return [messages[rank] if peer == rank else arrived[peer] for peer in range(channel.size)]
