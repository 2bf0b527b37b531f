"""Messages of one algorithm between its ranks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.errors import PayloadError, UnsupportedError
from hvd_compress.mpi.transport.progress import Wait

#: bytes that MPI cannot count
TOO_MANY = 2**31
#: further bits of a tag say which size the message has, if MPI has tags of so many bits
SIZE_BITS = 8
#: bytes of a message that needs the processor itself, so that nobody shall look for it all the time
_BULK = 32 * 1024


class Channel:
    """Messages of one algorithm between its ranks: 1-D contiguous arrays, told apart from other
    algorithms' by a tag and among themselves by their order."""

    def __init__(self, comm: Any, tag: int) -> None:
        self.comm, self.tag = comm, tag
        self.rank, self.size, self.peers = comm.rank, comm.size, comm.peers
        self.members: Sequence[int] = range(comm.size)  # by their numbers here
        self.bytes_sent = self.bytes_received = 0
        self.whole: Channel | None = None  # see within
        self.place = ""

    def within(self, members: Sequence[int], place: str) -> Channel:
        """Return the channel of the same algorithm among some of the ranks, numbered from 0.  Its
        bytes count in this one, too; time-outs name that ``place``."""
        channel = copy.copy(self)
        channel.members, channel.size = members, len(members)
        channel.rank = members.index(self.rank)
        channel.peers = [(channel.rank + i) % channel.size for i in range(1, channel.size)]
        channel.bytes_sent = channel.bytes_received = 0
        channel.whole, channel.place = self, f"{place}, "
        return channel

    def exchange(
        self,
        incoming: Mapping[int, np.ndarray],
        outgoing: Mapping[int, np.ndarray],
        phase: str,
        step: tuple[int, int] = (1, 1),
    ) -> Wait:
        """Begin to receive and to send arrays, by the rank at the other end.

        Return the messages to wait for; ``phase`` and ``step`` are those of :class:`.Wait`.
        """
        comm, requests, messages, is_bulk = self.comm, [], [], False
        received = sent = 0
        for comes, arrays in ((True, incoming), (False, outgoing)):
            begin = comm.mpi.Irecv if comes else comm.mpi.Isend
            for peer, array in arrays.items():
                size = array.nbytes
                received, sent = (received + size, sent) if comes else (received, sent + size)
                is_bulk |= size > _BULK
                pieces = [array]
                if comm.segment and size > comm.segment:
                    raw = array.view(np.uint8)
                    pieces = [raw[at : at + comm.segment] for at in range(0, size, comm.segment)]
                for piece in pieces:
                    length = piece.nbytes
                    # A message of another size shall not match: Open MPI 4.1 writes what is too
                    # long behind the end of the buffer.  It is missed until the time-out instead.
                    mixed = length * 0x9E3779B97F4A7C15 % 2**64 >> 64 - SIZE_BITS
                    tag = self.tag + comm.tags * (mixed % (1 << comm.size_bits))
                    requests.append(begin([piece, length, MPI.BYTE], self.members[peer], tag))
                    messages.append((self.members[peer], length, comes))
        self.bytes_received += received
        for counter in (self, self.whole, comm):
            if counter is not None:
                counter.bytes_sent += sent
        if self.whole is not None:
            self.whole.bytes_received += received
        return Wait(requests, messages, self.place + phase, step, is_bulk)


def exchange(
    channel: Channel,
    messages: Mapping[int, np.ndarray],
    sources: Collection[int],
    phase: str,
    step: tuple[int, int] = (1, 1),
    *,
    like: np.ndarray | None = None,
    limit: int = TOO_MANY - 1,
) -> Generator[Wait, None, dict[int, np.ndarray]]:
    """Send messages, and return those that arrive, by the rank that they come from.

    Args:
        channel: the channel of the algorithm.
        messages: 1-D uint8, by the rank that they go to.
        sources: the ranks that send one to this rank.
        phase, step: see :class:`.Wait`.
        like: all that arrive have as many bytes; ``None``: receivers do not know the sizes, which
            are sent ahead, as 8 bytes to each rank.
        limit: the largest number of bytes that a valid message may have.
    """
    if not messages and not sources:
        return {}
    arriving: dict[int, np.ndarray] = {}
    if like is not None:
        for peer in sources:
            arriving[peer] = np.empty_like(like)
        yield channel.exchange(arriving, messages, phase, step)
        return arriving
    sizes, ahead = {}, {}
    for peer in sources:
        sizes[peer] = np.empty(1, "<i8")
    for peer, message in messages.items():
        if message.nbytes >= TOO_MANY:
            raise UnsupportedError(f"a message of {message.nbytes} bytes: split the tensor")
        ahead[peer] = np.array([message.nbytes], "<i8")
    yield channel.exchange(sizes, ahead, f"{phase}, sizes", step)
    for peer, size in sizes.items():
        if not 0 <= size[0] <= limit:
            raise PayloadError(
                f"bad payload from rank {peer}: {size[0]} bytes announced where {limit} are the "
                "most: the ranks' calls differ"
            )
        arriving[peer] = np.empty(size[0], np.uint8)
    yield channel.exchange(arriving, messages, phase, step)
    return arriving
