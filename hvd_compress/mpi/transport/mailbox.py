"""Messages of unknown size from anybody, for programs whose ranks do different things."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.errors import UnsupportedError
from hvd_compress.mpi.transport.channel import TOO_MANY
from hvd_compress.mpi.transport.communicator import Communicator

_TAG = 0
#: seconds without a message after which looks are apart, and how far at most
_SPIN, _NAP = 5e-4, 1e-3


class Mailbox:
    """Sends frames without waiting, and returns those that have arrived.

    Frames from one rank arrive in order.  Frames to a rank that is gone stay here.

    Args:
        comm: a communicator that nothing else uses.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._leaving: list[tuple[Any, np.ndarray, int]] = []
        self._coming: list[tuple[int, Any, np.ndarray]] = []
        self._moved = time.monotonic()

    def send(self, frame: np.ndarray, to: int) -> None:
        """Begin to send a frame (1-D, uint8), which must not be changed any more."""
        if frame.nbytes >= TOO_MANY:
            raise UnsupportedError(
                f"a message of {frame.nbytes} bytes: at most {TOO_MANY - 1} are sent at once, so "
                "divide the parameters among several ParameterServers"
            )
        self.comm.bytes_sent += frame.nbytes
        request = self.comm.mpi.Isend([frame, frame.nbytes, MPI.BYTE], to, _TAG)
        self._leaving.append((request, frame, to))

    def arrived(self) -> list[tuple[int, np.ndarray]]:
        """Return the ranks and frames that are here, in the order in which they began to arrive
        from each rank."""
        status = MPI.Status()
        while (found := self.comm.mpi.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
            frame = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            request = found.Irecv([frame, frame.nbytes, MPI.BYTE])
            self._coming.append((status.Get_source(), request, frame))
        self._leaving = [each for each in self._leaving if not each[0].Test()]
        here, still, behind = [], [], set()
        for each in self._coming:
            source, request, frame = each
            # A short message may overtake the long one before it.
            if source not in behind and request.Test():
                here.append((source, frame))
            else:
                still.append(each)
                behind.add(source)
        self._coming = still
        if here:
            self._moved = time.monotonic()
        return here

    def nap(self) -> None:
        """Let others work until something may have arrived."""
        if time.monotonic() - self._moved < _SPIN:
            os.sched_yield()
        else:
            time.sleep(_NAP)

    def has_left(self, but_to: Collection[int] = ()) -> bool:
        """Return whether all that was sent has left, but to those ranks; until then the mailbox
        must live, since MPI reads from its frames."""
        self._leaving = [each for each in self._leaving if not each[0].Test()]
        return all(to in but_to for _, _, to in self._leaving)
