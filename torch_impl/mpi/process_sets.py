"""Ranks: all of them, those of a node, and sets that work together."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

from hvd_compress import mpi
from hvd_compress.errors import ConfigError, SetupError


class ProcessSet:
    """Ranks that work together; only those that belong to it may use it.

    Args:
        ranks: their numbers among all ranks; ``None`` for all.
    """

    def __init__(self, ranks: Sequence[int] | None) -> None:
        self.ranks = None if ranks is None else sorted(ranks)
        self.comm: mpi.Communicator | None = None

    def included(self) -> bool:
        """Return whether this rank belongs to the set."""
        return self.comm is not None

    def rank(self) -> int:
        """Return this rank's number in the set."""
        return self.communicator.rank

    def size(self) -> int:
        """Return the number of ranks in the set."""
        return self.communicator.size

    @property
    def communicator(self) -> mpi.Communicator:
        """The communicator of these ranks.

        Raises:
            SetupError: this rank does not belong to it, or ``hvd.init()`` is missing.
        """
        if self.comm is None:
            raise SetupError(
                "call hvd.init() first"
                if self is global_process_set
                else f"this rank is not in the process set {self.ranks}"
            )
        return self.comm


global_process_set = ProcessSet(None)
_node: list[mpi.Communicator] = []


def init(comm: MPI.Comm | None = None) -> None:
    """Begin; every rank calls it, once or more often.

    Args:
        comm: the ranks that train together; ``None`` for all.
    """
    if global_process_set.comm is None:
        global_process_set.comm = mpi.Communicator(comm)
        ranks = global_process_set.comm
        _node.append(mpi.Communicator(ranks.mpi.Split_type(MPI.COMM_TYPE_SHARED)))


def shutdown() -> None:
    """Free all communicators; ``init`` may be called again."""
    for comm in [global_process_set.comm, *_node]:
        if comm is not None:
            comm.free()
    global_process_set.comm = None
    _node.clear()


def is_initialized() -> bool:
    """Return whether ``init`` was called, and no ``shutdown`` since."""
    return global_process_set.included()


def rank() -> int:
    """Return the number of this rank among all."""
    return global_process_set.rank()


def size() -> int:
    """Return the number of all ranks."""
    return global_process_set.size()


def local_rank() -> int:
    """Return the number of this rank on its node."""
    global_process_set.rank()  # says if init() is missing
    return _node[0].rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    global_process_set.rank()  # says if init() is missing
    return _node[0].size


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks usable; every rank calls it.

    Raises:
        ConfigError: there is no rank of such a number.
    """
    found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    everyone = global_process_set.communicator
    members = list(range(everyone.size)) if found.ranks is None else found.ranks
    if bad := [r for r in members if not 0 <= r < everyone.size]:
        raise ConfigError(
            f"process set with rank {bad[0]}: there are ranks 0 to {everyone.size - 1}"
        )
    color = 0 if everyone.rank in members else MPI.UNDEFINED
    part = everyone.mpi.Split(color, everyone.rank)
    if part != MPI.COMM_NULL:
        found.comm = mpi.Communicator(part)
        part.Free()
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Free the communicator of the set and return ``True``; every rank calls it."""
    if process_set.comm is not None:
        process_set.comm.free()
        process_set.comm = None
    return True
