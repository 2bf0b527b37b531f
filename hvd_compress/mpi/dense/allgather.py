"""Every rank's bytes on every rank: one message from each rank to each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hvd_compress.mpi.transport.communicator import Channel, Communicator, others
from hvd_compress.mpi.transport.point_to_point import exchange, exchange_open
from hvd_compress.mpi.transport.progress import Algorithm


def allgather(
    message: np.ndarray, *, comm: MPI.Comm | Communicator | None = None
) -> list[np.ndarray]:
    """Return every rank's ``message`` (1-D, uint8, of any size), in rank order."""
    comm = Communicator.of(comm)
    comm.agree("allgather")
    return comm.run("allgather", gather(comm.channel(), message))[0]


def gather(
    channel: Channel,
    message: np.ndarray,
    known_sizes: Sequence[int] | None = None,
    phase: str = "payloads",
) -> Algorithm:
    """Return every rank's ``message``, in rank order.  Sizes in bytes are exchanged first unless
    they are known, by rank."""
    rank, peers = channel.rank, others(channel.rank, channel.size)
    outgoing = dict.fromkeys(peers, message)
    if known_sizes is None:
        arrived = yield from exchange_open(channel, outgoing, peers, phase)
    else:
        buffers = {peer: np.empty(known_sizes[peer], np.uint8) for peer in peers}
        arrived = yield from exchange(channel, outgoing, buffers, phase)
    return [message if peer == rank else arrived[peer] for peer in range(channel.size)]
