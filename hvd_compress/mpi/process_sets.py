"""Ranks: all of them, those of a node, and sets that work together."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from hvd_compress.config import is_one_of, no_process_set
from hvd_compress.errors import ConfigError, SetupError
from hvd_compress.mpi.engine import MpiEngine
from hvd_compress.mpi.transport.communicator import Communicator

#: Horovod's names, which every drop-in over MPI alone has
__all__ = [
    *("ProcessSet", "add_process_set", "global_process_set", "init", "is_initialized"),
    *("local_rank", "local_size", "rank", "remove_process_set", "shutdown", "size"),
]


class ProcessSet:
    """Ranks that work together; only those that belong to it may use it.

    Args:
        ranks_or_comm: their numbers among all ranks, from 0, in any order; ``None`` for all.  Named
            as Horovod's, though over MPI a communicator is refused.

    >>> pair = hvd.add_process_set(hvd.ProcessSet([0]))
    >>> pair.included(), pair.rank(), pair.size()
    (True, 0, 1)
    >>> hvd.remove_process_set(pair)
    True
    """

    def __init__(self, ranks_or_comm: Sequence[int] | None) -> None:
        self.ranks = None if ranks_or_comm is None else _numbers(ranks_or_comm)
        self.comm: Communicator | None = None
        self._engine: MpiEngine | None = None

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
    def communicator(self) -> Communicator:
        """The communicator of these ranks.

        Raises:
            SetupError: this rank does not belong to it, or ``hvd.init()`` is missing.
        """
        if self.comm is not None:
            return self.comm
        if self is global_process_set:
            raise SetupError("call hvd.init() first")
        if self in _made:
            raise SetupError(f"this rank is not in the process set {self.ranks}")
        raise SetupError(
            f"the process set {self.ranks} is not there yet: hvd.add_process_set(...), or "
            "hvd.init(process_sets=[...])"
        )

    @property
    def engine(self) -> MpiEngine:
        """An engine for exchanges that come one after the other, whoever makes them; its first use
        is a collective of these ranks."""
        if self._engine is None:
            self._engine = MpiEngine(self.communicator)
        return self._engine

    def free(self) -> None:
        """Free what this has of MPI; a collective of these ranks."""
        if self._engine is not None:
            self._engine.close()
        if self.comm is not None:
            self.comm.free()
        self.comm = self._engine = None


def _numbers(ranks: Any) -> list[int]:
    try:
        return sorted({operator.index(rank) for rank in ranks})
    except TypeError:
        raise ConfigError(
            f"ranks_or_comm={ranks!r}: the numbers of its ranks, such as hvd.ProcessSet([0, 1])"
        ) from None


global_process_set = ProcessSet(None)
#: the number of this rank on its node, and of the ranks there
_on_node = (0, 1)
#: in the order in which all ranks made them
_made: list[ProcessSet] = []


def init(
    comm: MPI.Comm | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Begin; every rank calls it, once or more often.

    Args:
        comm: the ranks that train together; ``None`` for all.
        process_sets: sets of ranks that :func:`add_process_set` shall make at once.  Horovod's
            "dynamic" is accepted: sets can always be added.

    Raises:
        SetupError: MPI was initialised without support for threads.
    """
    sets: Any = [] if is_one_of(process_sets, (None, "dynamic")) else process_sets
    if not isinstance(sets, Sequence) or not all(isinstance(x, ProcessSet) for x in sets):
        raise ConfigError(
            f'process_sets={process_sets!r}: a list such as [hvd.ProcessSet([0, 1])], or "dynamic"'
        )
    if global_process_set.comm is None:
        global _on_node
        global_process_set.comm = Communicator(comm)
        global_process_set.comm.agree("init()", always=True)  # the rest has no time-out
        node = global_process_set.comm.mpi.Split_type(MPI.COMM_TYPE_SHARED)
        _on_node = (node.rank, node.size)
        node.Free()
    for process_set in sets:
        add_process_set(process_set)


def shutdown() -> None:
    """Free all communicators; ``init`` may be called again."""
    for process_set in [*_made, global_process_set]:
        process_set.free()
    _made.clear()


def is_initialized() -> bool:
    """Return whether ``init`` was called, and no ``shutdown`` since."""
    return global_process_set.included()


def rank() -> int:
    """Return the number of this rank among all, from 0; before ``init`` it is a ``SetupError``, as
    it is for the three others."""
    return global_process_set.rank()


def size() -> int:
    """Return the number of all ranks."""
    return global_process_set.size()


def local_rank() -> int:
    """Return the number of this rank on its node."""
    global_process_set.rank()  # says if init() is missing
    return _on_node[0]


def local_size() -> int:
    """Return the number of ranks on this node."""
    global_process_set.rank()  # says if init() is missing
    return _on_node[1]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a set of ranks usable, and return it; every rank calls it.

    Args:
        process_set: a :class:`ProcessSet`, or numbers of ranks.
    """
    everyone = global_process_set.communicator
    with everyone.told(always=True):
        found = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
        members = list(range(everyone.size)) if found.ranks is None else found.ranks
        if bad := [r for r in members if not 0 <= r < everyone.size]:
            raise ConfigError(
                f"process set with rank {bad[0]}: there are ranks 0 to {everyone.size - 1}"
            )
    is_made = found is global_process_set or found in _made
    again = ", which is there" if is_made else ""
    everyone.agree(f"add_process_set({members}){again}", always=True)  # the rest has no time-out
    if is_made:
        return found
    color = 0 if everyone.rank in members else MPI.UNDEFINED
    split = everyone.mpi.Split(color, everyone.rank)
    if split != MPI.COMM_NULL:
        found.comm = Communicator(split)
        split.Free()
    _made.append(found)
    return found


def remove_process_set(process_set: ProcessSet) -> bool:
    """Free the communicator of ``process_set``, and return whether it was one that
    :func:`add_process_set` had made; every rank calls it.
    """
    if not isinstance(process_set, ProcessSet):
        raise no_process_set(process_set)
    if process_set not in _made:
        return False
    call = f"remove_process_set({process_set.ranks})"
    global_process_set.communicator.agree(call, always=True)
    _made.remove(process_set)
    process_set.free()
    return True


def communicator_of(process_set: Any) -> Communicator:
    """Return the communicator of a value for the option ``process_set``.

    Raises:
        SetupError: this rank does not belong to it, or ``hvd.init()`` is missing.
    """
    if not isinstance(process_set, ProcessSet):
        raise no_process_set(process_set)
    return process_set.communicator


def engine_over(process_set: ProcessSet | None, predivide: float = 1.0) -> MpiEngine:
    """Return a new engine for the ranks of a set, ``None`` for all.  Other ranks have a world of
    their own, where nothing is exchanged.  A collective."""
    chosen = global_process_set if process_set is None else process_set
    if not isinstance(chosen, ProcessSet):
        raise no_process_set(chosen)
    if chosen is global_process_set:
        chosen.rank()  # says if init() is missing
    if not chosen.included():
        return MpiEngine(MPI.COMM_SELF)
    return MpiEngine(chosen.comm, predivide=predivide)
