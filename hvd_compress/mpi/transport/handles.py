"""Handles that MPI keeps for a communicator, and the time when they are given back.

Freeing a communicator is a collective, and the end of an object is not: ranks collect garbage at
times of their own.  So what a :class:`.Communicator` has of MPI's lives here, and outlives it.  The
making of another one from the same communicator is a collective.  Then the ranks tell each other
what they have dropped, and free what all have.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterable
from typing import Any

from mpi4py import MPI

#: as many tags as are used in turn at most, in bits; every MPI has 2**15
TAG_BITS = 20
#: so many that are in use let the garbage be collected before more are made
_MANY = 64


#: of all duplicates that are not freed, also of those that this rank has dropped
unfreed: weakref.WeakSet[Handles] = weakref.WeakSet()


class Handles:
    """The handles of one communicator.

    Attributes:
        mpi: the communicator, an ``MPI.Comm``.
        name: eight bytes that all its ranks know and no other communicator has; none for one that
            belongs to the caller.
        under_way: jobs whose buffers MPI reads from or writes to; they keep their owner alive.
        kept: further objects that MPI may still use.
        is_broken: messages may arrive at any time, so nothing is freed.
    """

    def __init__(self, mpi: MPI.Comm, name: bytes = b"") -> None:
        self.mpi, self.name = mpi, name
        self.under_way: set[Any] = set()
        self.kept: list[Any] = []
        self.is_broken = False

    @property
    def has_broken(self) -> bool:
        """Whether it is broken, or what was made from it, which would be freed with it."""
        return self.is_broken or any(
            each.has_broken for each in family_of(self.mpi)._handles.values()
        )

    def free(self) -> None:
        """Give everything back; a collective."""
        self.mpi.Free()
        unfreed.discard(self)


class Family:
    """The communicators that were made from one, numbered in the order of their making, which is
    the same on all ranks."""

    def __init__(self) -> None:
        self._handles: dict[int, Handles] = {}
        self._dropped: set[int] = set()
        self._made, self._many = 0, _MANY

    def add(self, owner: object, handles: Handles) -> None:
        """Note a new one, which ``owner`` uses as long as it lives."""
        self._handles[self._made] = handles
        # It runs in the midst of anything, so it calls nothing of MPI.
        weakref.finalize(owner, self._dropped.add, self._made).atexit = False
        self._made += 1

    def remove(self, handles: Handles) -> None:
        """Forget one that its owners free themselves, on all ranks."""
        self._handles = {n: each for n, each in self._handles.items() if each is not handles}
        self._dropped.intersection_update(self._handles)  # the set that finalizers know

    def dropped(self) -> list[int]:
        """Return the numbers of those that this rank does not use any more."""
        if len(self._handles) - len(self._dropped) >= self._many:
            gc.collect()  # reducers and engines are parts of cycles
            self._many = max(_MANY, 2 * (len(self._handles) - len(self._dropped)))
        self._dropped.intersection_update(self._handles)  # the set that finalizers know
        found = sorted(self._dropped)  # to which they add whenever garbage is collected
        return [n for n in found if n in self._handles and not self._handles[n].has_broken]

    def free(self, numbers: Iterable[int]) -> None:
        """Free those that all ranks have dropped, with all that was made from them.  A child keeps
        its parent alive, so all ranks have dropped the children too.  A collective."""
        for number in sorted(numbers):
            handles = self._handles.pop(number)
            made = family_of(handles.mpi)
            made.free(list(made._handles))
            handles.free()


def family_of(comm: MPI.Comm) -> Family:
    """Return the family of the communicators that were made from ``comm``."""
    found: Any = comm.Get_attr(_key())
    if found is None:
        found = Family()
        comm.Set_attr(_key(), found)
    return found


def tags() -> int:
    """Return the number of tags that a communicator uses, 0 and up."""
    return 1 << min(bits_of_tags(), TAG_BITS)


def bits_of_tags() -> int:
    """Return the bits of this MPI's tags."""
    largest: Any = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    return (largest + 1).bit_length() - 1


@functools.cache
def _key() -> int:
    return MPI.Comm.Create_keyval()
