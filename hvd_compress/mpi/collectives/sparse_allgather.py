"""Sparse allgather: every rank's entries go to every rank, which adds them up in rank order.

One message to each rank, after one of 8 bytes with its size.  A rank receives the entries of all
others, k (P - 1) of them, however many fall on the same places.
"""

from __future__ import annotations

from collections.abc import Generator

from hvd_compress.base import Sparse
from hvd_compress.meetings.sparse_vectors import Vector, empty
from hvd_compress.mpi.collectives.sparse_messages import Format, Summed
from hvd_compress.mpi.transport.channel import Channel, exchange
from hvd_compress.mpi.transport.progress import Wait
from hvd_compress.wire import sparse_size


def gather(
    channel: Channel, mine: Vector, lengths: list[int], form: Format, phase: str
) -> Generator[Wait, None, list[Vector]]:
    """Return every rank's vector, in rank order; that of rank r has ``lengths[r]`` elements.

    A rank's own is read from its own frame, so that all ranks hold the same.
    """
    peers = channel.peers
    frame = form.encode(mine, lengths[channel.rank])
    most = max(lengths)
    limit = sparse_size(most, most, form.wire)
    frames = yield from exchange(channel, dict.fromkeys(peers, frame), peers, phase, limit=limit)
    frames[channel.rank] = frame
    return [form.decode(frames[r], lengths[r], form.wire, r) for r in range(channel.size)]


def allgather(channel: Channel, mine: Sparse, form: Format) -> Summed:
    """Return the result, and what rounding it took off: nothing."""
    lengths = [form.n] * channel.size
    parts = yield from gather(channel, mine, lengths, form, "sparse allgather")
    return form.result(form.add_up(parts, form.n, form.dtype)), empty(form.wide)
