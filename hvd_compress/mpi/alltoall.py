"""A message from each rank to each other; all ranks have equally many bytes for the same rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_compress.mpi.communicator import Channel, others
from hvd_compress.mpi.work import Algorithm, Wait


def swap(channel: Channel, messages: Sequence[np.ndarray]) -> Algorithm:
    """The algorithm; ``messages`` (1-D, uint8) by the rank they are for.  Its result is what each
    rank has for this one."""
    rank = channel.rank
    peers = others(rank, channel.size)
    arriving = [np.empty_like(messages[rank]) for _ in messages]
    arriving[rank] = messages[rank]
    under_way = [channel.receive(arriving[peer], peer) for peer in peers]
    under_way += [channel.send(messages[peer], peer) for peer in peers]
    yield Wait(under_way, "payloads")
    return arriving
