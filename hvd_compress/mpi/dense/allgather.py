"""Every rank's bytes on every rank: one message from each rank to each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from hvd_compress.errors import PayloadError
from hvd_compress.mpi.transport.communicator import Channel, Communicator, others
from hvd_compress.mpi.transport.progress import Algorithm, Wait


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
    """The algorithm.  Sizes in bytes are exchanged first unless they are known, by rank."""
    peers = others(channel.rank, channel.size)
    sizes = np.array(known_sizes or channel.size * [message.nbytes], np.int64)
    if known_sizes is None:
        mine = sizes[channel.rank : channel.rank + 1].copy()
        lengths = [channel.receive(sizes[peer : peer + 1], peer) for peer in peers]
        lengths += [channel.send(mine, peer) for peer in peers]
        yield Wait(lengths, "sizes of payloads")
        check_sizes(sizes)
    everything = [np.empty(size, np.uint8) for size in sizes]
    everything[channel.rank] = message
    messages = [channel.receive(everything[peer], peer) for peer in peers]
    messages += [channel.send(message, peer) for peer in peers]
    yield Wait(messages, phase)
    return everything


def check_sizes(sizes: np.ndarray) -> None:
    """Raise unless there can be messages of as many bytes as ranks announce."""
    if sizes.min() < 0 or sizes.max() >= 2**31:
        raise PayloadError(f"ranks announce payloads of {sizes.tolist()} bytes")
