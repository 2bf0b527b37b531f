"""Messages between pairs of ranks, all in flight at once."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping

import numpy as np

from hvd_compress.errors import PayloadError, UnsupportedError
from hvd_compress.mpi.transport.communicator import Channel
from hvd_compress.mpi.transport.progress import Wait

#: bytes that MPI cannot count
TOO_MANY = 2**31


def exchange(
    channel: Channel,
    messages: Mapping[int, np.ndarray],
    buffers: dict[int, np.ndarray],
    phase: str,
    step: tuple[int, int] = (1, 1),
) -> Generator[Wait, None, dict[int, np.ndarray]]:
    """Send ``messages`` (1-D, by the rank that they go to), and return ``buffers`` (1-D, by the
    rank that they come from) filled with what arrives.  ``phase`` and ``step`` are those of
    :class:`.Wait`."""
    moving = [channel.receive(buffer, peer) for peer, buffer in buffers.items()]
    moving += [channel.send(message, peer) for peer, message in messages.items()]
    yield Wait(moving, phase, step)
    return buffers


def exchange_open(
    channel: Channel,
    messages: Mapping[int, np.ndarray],
    sources: Collection[int],
    phase: str,
    step: tuple[int, int] = (1, 1),
    limit: int = TOO_MANY - 1,
) -> Generator[Wait, None, dict[int, np.ndarray]]:
    """Do the same where receivers do not know the sizes of messages: these are sent ahead, as 8
    bytes to each rank.

    Args:
        channel: the channel of the algorithm.
        messages: 1-D uint8, by the rank that they go to.
        sources: the ranks that send one to this rank.
        phase, step: see :class:`.Wait`.
        limit: the largest number of bytes that a valid message may have.

    Raises:
        PayloadError: a rank announces more than that.
        UnsupportedError: a message has more bytes than MPI can count.
    """
    if not messages and not sources:
        return {}
    longest = max((message.nbytes for message in messages.values()), default=0)
    if longest >= TOO_MANY:
        raise UnsupportedError(f"a message of {longest} bytes: split the tensor")
    own = {peer: np.array([message.nbytes], "<i8") for peer, message in messages.items()}
    sizes = {peer: np.empty(1, "<i8") for peer in sources}
    yield from exchange(channel, own, sizes, f"{phase}, sizes", step)
    for peer, size in sizes.items():
        if not 0 <= size[0] <= limit:
            raise PayloadError(
                f"bad payload from rank {peer}: {size[0]} bytes announced where {limit} are the "
                "most: the ranks' calls differ"
            )
    arriving = {peer: np.empty(size[0], np.uint8) for peer, size in sizes.items()}
    return (yield from exchange(channel, messages, arriving, phase, step))
