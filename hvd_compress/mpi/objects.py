"""Bytes and objects of all ranks, whatever the framework: Horovod's functions on single tensors and
objects are made of these."""

from __future__ import annotations

import pickle
import zlib
from typing import Any

import numpy as np

from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.mpi.dense.allgather import allgather
from hvd_compress.mpi.process_sets import ProcessSet, communicator_of, global_process_set
from hvd_compress.mpi.transport.communicator import Communicator
from hvd_compress.mpi.transport.progress import Algorithm


def gather_bytes(raw: np.ndarray, kind: str, process_set: ProcessSet) -> list[np.ndarray]:
    """Return every rank's bytes, in rank order.

    Args:
        raw: 1-D, uint8, of any size.
        kind: what the bytes are, the same on all ranks.

    Raises:
        MismatchError: it is not.
    """
    head = np.array([zlib.crc32(kind.encode())], "<u4").view(np.uint8)
    messages = allgather(np.concatenate([head, raw]), comm=communicator_of(process_set))
    if any((message[:4] != head).any() for message in messages):
        raise MismatchError(f"ranks gather rows of different dtype or shape; here it is {kind}")
    return [message[4:] for message in messages]


def broadcast_bytes(raw: np.ndarray, root_rank: int, what: str, process_set: ProcessSet) -> None:
    """Overwrite bytes by those of ``root_rank``.

    Args:
        raw: 1-D, uint8, as long on all ranks.
        root_rank: among all ranks.
        what: is sent, the same on all ranks.

    Raises:
        ConfigError: the root is not in the set.
        MismatchError: the ranks send different things.
    """
    comm = communicator_of(process_set)
    members = range(comm.size) if process_set.ranks is None else process_set.ranks
    if root_rank not in members:
        raise ConfigError(f"root_rank={root_rank} is not one of the ranks {list(members)}")
    comm.agree(f"broadcast({what}, root {root_rank})")
    comm.run("broadcast", _broadcast(comm, raw, list(members).index(root_rank)))


def _broadcast(comm: Communicator, raw: np.ndarray, root: int) -> Algorithm:
    """Broadcast by MPI's own collective, in pieces that its counts can express."""
    for first in range(0, raw.size, 2**30):
        request = comm.mpi.Ibcast(raw[first : first + 2**30], root)
        yield comm.collective(request, "MPI_Ibcast")


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Args:
        obj: anything that can be pickled; of any size, which may differ between ranks.
        name: accepted as Horovod's.
        process_set: the ranks that take part.
    """
    raw = np.frombuffer(pickle.dumps(obj), np.uint8)
    return [pickle.loads(part.tobytes()) for part in gather_bytes(raw, "object", process_set)]


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
        ConfigError: the root is not one of them.
    """
    is_root = global_process_set.rank() == root_rank
    raw = np.frombuffer(pickle.dumps(obj) if is_root else b"", np.uint8).copy()
    length = np.array([raw.size], np.int64)
    broadcast_bytes(length.view(np.uint8), root_rank, "size of an object", process_set)
    if not is_root:
        raw = np.empty(length[0], np.uint8)
    broadcast_bytes(raw, root_rank, "object", process_set)
    return pickle.loads(raw.tobytes())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of ``process_set`` have called this."""
    comm = communicator_of(process_set)
    comm.run("barrier", _barrier(comm))


def _barrier(comm: Communicator) -> Algorithm:
    yield comm.collective(comm.mpi.Ibarrier(), "MPI_Ibarrier")
