"""Notes that ranks leave for each other while one may wait for another.  They say that a rank waits
somewhere else meanwhile, or that its program has ended.

A rank that had fewer batches than the others goes on with something else, and the others wait for
it.  Then each can say where the other one is.

Notes that nobody reads may outlive their communicator, and MPI delivers them to the next one that
gets its number, whose ranks may be others.  So each begins with the name of its communicator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.agreement import UNEVEN
from hvd_compress.mpi.transport.handles import Handles, tags, unfreed

#: counted from the end of a communicator's tags
_TAG = 1
_BYTES = 200
ENDED, GAVE_UP = "has ended its program", "has given up"


def leave(places: Iterable[Handles], text: str) -> None:
    """Tell all ranks of these communicators what is true of this one, such as "waits in f()"."""
    for place in places:
        rank, size = place.mpi.rank, place.mpi.size
        signed = place.name + text.encode()
        note = np.frombuffer(signed[:_BYTES].ljust(_BYTES), np.uint8)
        for peer in range(size) if not place.is_broken else ():
            if peer != rank:
                send = place.mpi.Isend([note, _BYTES, MPI.BYTE], peer, tags() - _TAG)
                place.kept.append(send)  # which has the note


def leave_elsewhere(comm: Any, text: str) -> None:
    """Tell whoever may wait on other communicators, while this rank waits on this one."""
    leave([each for each in unfreed if each is not comm.handles], text)


def read(comm: Any) -> dict[int, str]:
    status, name = MPI.Status(), comm.handles.name
    while name and (found := comm.mpi.Improbe(MPI.ANY_SOURCE, comm.tags - _TAG, status)):
        note = np.empty(_BYTES, np.uint8)
        found.Recv([note, _BYTES, MPI.BYTE])
        signed = note.tobytes()
        if signed.startswith(name):
            comm.notes[status.Get_source()] = signed[len(name) :].decode(errors="replace").rstrip()
    return comm.notes


def told(comm: Any) -> str:
    """Return what other ranks have said of themselves, as the end of a message."""
    notes = sorted(read(comm).items())
    said = [f"rank {rank} {note}" for rank, note in notes if note]
    return f". But {', '.join(said)}: {UNEVEN}" if said else ""


def ended(comm: Any) -> set[int]:
    """Return the ranks from which nothing will come any more."""
    notes = read(comm).items()
    return {rank for rank, note in notes if note in (ENDED, GAVE_UP)}
