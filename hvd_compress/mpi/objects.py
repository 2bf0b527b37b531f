"""Bytes and objects of all ranks, whatever the framework: Horovod's functions on single tensors and
objects are made of these."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvd_compress.config import is_one_of
from hvd_compress.errors import ConfigError
from hvd_compress.mpi.collectives.payloads import broadcast, gather
from hvd_compress.mpi.process_sets import ProcessSet, communicator_of, global_process_set
from hvd_compress.wire.content import decode_bytes, encode_bytes
from hvd_compress.wire.objects import pickled, unpickled

_OBJECT, _SIZE = "object", "size of an object"


def gather_bytes(raw: np.ndarray, kind: str, process_set: ProcessSet) -> list[np.ndarray]:
    """Return every rank's bytes, in rank order.

    Args:
        raw: 1-D, uint8, of any size.
        kind: what the bytes are, the same on all ranks.
    """
    comm = communicator_of(process_set)
    comm.agree("allgather")
    (frames,) = comm.run("allgather", gather(comm.channel(), encode_bytes(raw, kind)))
    return [decode_bytes(x, kind, sender=f"rank {rank}") for rank, x in enumerate(frames)]


def broadcast_bytes(
    raw: np.ndarray, root_rank: int, what: str, process_set: ProcessSet, *, always: bool = False
) -> None:
    """Overwrite bytes by those of ``root_rank``.

    Args:
        raw: 1-D, uint8, as long on all ranks.
        root_rank: among all ranks.
        what: is sent, the same on all ranks.
        always: compare it also after the first calls.
    """
    comm = communicator_of(process_set)
    members = range(comm.size) if process_set.ranks is None else process_set.ranks
    with comm.told(always=always):
        if not is_one_of(root_rank, members):
            raise ConfigError(f"root_rank={root_rank!r} is not one of the ranks {list(members)}")
    comm.agree(f"broadcast({what}, root {root_rank})", always=always)
    root = list(members).index(root_rank)
    for first in range(0, raw.size, 2**30):  # MPI cannot count more
        comm.run("broadcast", broadcast(comm.channel(), raw[first : first + 2**30], root))


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: anything that can be pickled; of any size, which may differ between ranks.
        name: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        UnsupportedError: on all ranks, if one of them cannot pickle its object; it names the entry.
    """
    parts = gather_bytes(np.frombuffer(pickled(obj), np.uint8), _OBJECT, process_set)
    return [unpickled(part.tobytes(), f"rank {rank}") for rank, part in enumerate(parts)]


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of ``root_rank`` on all ranks.

    Args:
        obj: anything that can be pickled; not looked at on other ranks.
        root_rank: whose it is, among all ranks.
        name: accepted as Horovod's.
        process_set: the ranks that take part.

    Raises:
        UnsupportedError: on all ranks, if the root cannot pickle it; it names the entry.
    """
    is_root = is_one_of(root_rank, (global_process_set.rank(),))
    frame = encode_bytes(pickled(obj) if is_root else b"", _OBJECT)
    size = encode_bytes(np.array([frame.size], "<i8").view(np.uint8), _SIZE)
    broadcast_bytes(size, root_rank, _SIZE, process_set)
    sender = f"rank {root_rank}"
    if not is_root:
        frame = np.empty(decode_bytes(size, _SIZE, sender=sender, size=8).view("<i8")[0], np.uint8)
    broadcast_bytes(frame, root_rank, _OBJECT, process_set)
    return unpickled(decode_bytes(frame, _OBJECT, sender=sender).tobytes(), sender)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of ``process_set`` have called this."""
    comm = communicator_of(process_set)
    comm.run("barrier", gather(comm.channel(), np.empty(0, np.uint8), equal_sizes=True))
