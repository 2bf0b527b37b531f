"""The communicator of this package: a duplicate of MPI's, with tags, a time-out, and a check that
all ranks make the same calls."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import secrets
import sys
import weakref
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.agreement import by_rank
from hvd_compress.config import number_from_environment, time_out
from hvd_compress.errors import (
    CollectiveTimeout,
    CompressionError,
    ConfigError,
    MismatchError,
    SetupError,
)
from hvd_compress.mpi.transport import notes
from hvd_compress.mpi.transport.channel import SIZE_BITS, Channel
from hvd_compress.mpi.transport.handles import (
    TAG_BITS,
    Handles,
    bits_of_tags,
    family_of,
    tags,
    unfreed,
)
from hvd_compress.mpi.transport.progress import (
    COLLECTIVE,
    Algorithm,
    Wait,
    Work,
    wait_for,
)
from hvd_compress.times import end_at_once
from hvd_compress.wire.content import decode_end_to_end, encode_bytes

logger = logging.getLogger("hvd_compress")

#: below the size from which MPIs announce a message over TCP before they send it, 64 KiB mostly
_SEGMENT = 60 * 1024
#: bytes of a call's description that ranks compare
_DESCRIPTION = 384
#: what ranks tell each other when a communicator is made
_OPTIONS = "options of a communicator"


class Communicator:
    """The communicator that collectives run on, for other limits than those of the environment::

        allreduce(x, comm=Communicator(timeout=60))

    Functions that take an ``MPI.Comm`` make one at their first call, which is a collective.

    Args:
        comm: an intracommunicator; ``None``: ``MPI.COMM_WORLD``.  Its duplicate is freed by
            :meth:`free`, or when the next one is made, after all ranks have dropped this object.
        timeout: seconds without progress until ``CollectiveTimeout``, and a tenth of them until a
            warning; ``$HVD_COMPRESS_TIMEOUT`` or 600.
        checks: number of first calls that ranks compare, so that a difference is an error instead
            of a hang; ``$HVD_COMPRESS_CHECKS`` or 20, -1 for always.
        segment: bytes of the pieces of long messages, 0 for whole ones; ``$HVD_COMPRESS_SEGMENT``,
            or 60 KiB between hosts that have Ethernet only.

    Attributes:
        bytes_sent: of all messages of this rank so far.
        peers: all other ranks; each rank begins with another, so that not all send to the same.

    >>> comm = Communicator(MPI.COMM_SELF, timeout=60)
    >>> comm.size, allreduce(np.ones(2), comm=comm)
    (1, array([1., 1.]))
    >>> comm.free()
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        timeout: float | None = None,
        checks: int | None = None,
        segment: int | None = None,
    ) -> None:
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise SetupError(
                "MPI was initialised for one thread only, and autograd may call from its own: set "
                'mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
            )
        comm = MPI.COMM_WORLD if comm is None else comm
        started = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or "1"
        if comm == MPI.COMM_WORLD and comm.size == 1 and started not in ("0", "1"):
            raise SetupError(
                f"{started} processes were started, and mpi4py sees only this one: it uses another "
                "MPI than the one of mpirun or mpiexec. Import mpi4py first, or set MPI4PY_LIBMPI"
            )
        if not isinstance(comm, MPI.Comm) or comm == MPI.COMM_NULL or comm.Is_inter():
            raise ConfigError(f"comm={comm!r}: an intracommunicator is needed")
        self._problem: str | None = None
        self.timeout = time_out(timeout)
        self.patience = self.timeout / 10
        self.checks = int(_option(checks, "HVD_COMPRESS_CHECKS", 20))
        self._options: dict[str, Any] = {
            "timeout": self.timeout,
            "checks": self.checks,
            "segment": segment,
        }
        self.rank, self.size = comm.rank, comm.size
        self.peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        self.tags = tags()
        self.size_bits = max(0, min(bits_of_tags() - TAG_BITS, SIZE_BITS))
        self.bytes_sent = 0
        self.segment = int(_option(segment, "HVD_COMPRESS_SEGMENT", -1))
        self.calls = 0
        self.notes: dict[int, str] = {}  # by the rank that has left it, see notes.py
        self._tuning = _Tuning()
        self.is_choosing = False  # an exchange, see choosing.py
        self._nodes: dict[int | None, Any] = {}  # see nodes.py
        self._made_from: Communicator | None = None  # which lives as long as this one
        self._family = family_of(comm)
        self._use(Handles(comm))  # until there is a duplicate
        dropped, name = self._settle()
        self._family.free(dropped)
        self._use(Handles(self.run("Communicator()", _duplicated(comm))[0], name))
        self.mpi.Set_errhandler(MPI.ERRORS_RETURN)
        unfreed.add(self.handles)
        self._family.add(self, self.handles)
        _alive.add(self)

    @classmethod
    def of(cls, comm: MPI.Comm | Communicator | None) -> Communicator:
        """Return the communicator that belongs to an ``MPI.Comm``; the first call makes it."""
        if isinstance(comm, cls):
            return comm
        comm = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(comm, MPI.Comm):
            raise ConfigError(f"comm={comm!r}: pass an mpi4py.MPI.Comm, or None for all ranks")
        found: Any = comm.Get_attr(_keyval())
        if found is None:
            found = cls(comm)
            comm.Set_attr(_keyval(), found)
        return found

    def _use(self, handles: Handles) -> None:
        self.handles, self.mpi, self.under_way = handles, handles.mpi, handles.under_way

    def _settle(self) -> tuple[set[int], bytes]:
        """Compare the options that must be the same on all ranks.

        Returns:
            The numbers of the communicators that all ranks have dropped, and a name for this one.
        """
        has_rdma = any(Path("/sys/class/infiniband").glob("*"))
        host, options = MPI.Get_processor_name(), [self.checks, self.segment]
        name = secrets.token_hex(4)  # the first rank's becomes that of all
        mine = json.dumps([options, host, has_rdma, self._family.dropped(), name])
        (texts,) = self.run("Communicator()", _texts_of_all(self.mpi, mine))
        everyones = list(map(json.loads, texts))
        if any(theirs != options for theirs, *_ in everyones):
            found = [f"rank {r}: {theirs}" for r, (theirs, *_) in enumerate(everyones)]
            raise MismatchError(f"ranks differ in (checks, segment): {', '.join(found)}")
        if self.segment < 0:
            same_host = len({host for _, host, *_ in everyones}) == 1
            is_whole = same_host or any(rdma for _, _, rdma, *_ in everyones)
            self.segment = 0 if is_whole else _SEGMENT
        dropped = set.intersection(*(set(theirs) for *_, theirs, _ in everyones))
        return dropped, everyones[0][-1].encode()

    def __repr__(self) -> str:
        return f"Communicator(rank {self.rank} of {self.size})"

    @property
    def cost_model(self) -> Any:
        return self._tuning.model

    @cost_model.setter
    def cost_model(self, model: Any) -> None:
        if model is not None and model.size != self.size:
            raise ConfigError(
                f"this cost model was measured on {model.size} ranks, and here are {self.size}: "
                "comm.cost_model = mpi.measure(comm)"
            )
        self._tuning.set(model)

    def named(self, algorithm: str) -> str:
        """Return what ranks compare of an algorithm: of "auto" also what chooses."""
        return self._tuning.auto if algorithm == "auto" else algorithm

    def duplicate(self, what: str = "another communicator") -> Communicator:
        """Return another communicator of the same ranks with the same options and cost model; a
        collective.  It is freed some time after it was dropped by all ranks.

        Args:
            what: it is for, which the ranks compare.
        """
        self.agree(what, always=True)
        other = Communicator(self.mpi, **self._options)
        other._tuning, other._made_from = self._tuning, self
        return other

    def free(self) -> None:
        """Free the duplicate now; this is a collective.  A broken one is not freed, and its rank
        may end like others."""
        if self in _broken:
            _broken.remove(self)
        if self.is_usable:
            wait_for(self, list(self.under_way))
            self._family.remove(self.handles)
            self.handles.free()

    # -- messages ----------------------------------------------------------------------------

    def channel(self) -> Channel:
        """Return a channel for the messages of one algorithm.  Ranks open channels in the same
        order."""
        tag = self.calls % (self.tags // 2)  # the other half is for channels that name theirs
        self.calls += 1
        return Channel(self, tag)

    def run(self, call: object, *algorithms: Algorithm, depth: int = 1) -> list[Any]:
        """Run algorithms to their end, and return their results."""
        self.check()
        return Work(self, call, algorithms, depth).wait()

    # -- agreement ---------------------------------------------------------------------------

    def agree(self, call: object, *, always: bool = False) -> None:
        """Check that all ranks are about to make the same ``call``, by its text.  ``always`` does
        so after as many calls as are checked, too.

        Raises:
            MismatchError: on every rank, if they are not.
            CollectiveTimeout: some rank makes no call at all, or the communicator is broken.
        """
        self.check()
        if (comparison := self._begin_to_compare(call, always)) is None:
            return
        (calls,) = comparison.wait()
        if len(set(calls)) > 1:
            lines = by_rank(calls)
            raise MismatchError("the ranks make different calls:\n" + "\n".join(lines))

    @contextlib.contextmanager
    def told(self, *, always: bool = False) -> Iterator[None]:
        """Tell the other ranks of an error in this context, where they :meth:`agree`, ``always`` or
        not.  An error on this rank alone is one on all."""
        try:
            yield
        except CompressionError as error:
            if self.is_usable:
                self._begin_to_compare(f"{type(error).__name__}: {error}", always)
            raise

    def _begin_to_compare(self, call: object, always: bool = False) -> Work | None:
        """Send ``call`` to all ranks, which returns theirs; ``None`` if that is not due."""
        if self.size == 1 or not (self.checks or always):
            return None
        self.checks -= 1 if self.checks > 0 and not always else 0
        return Work(self, call, [self._compare(str(call))])

    def _compare(self, call: str) -> Algorithm:
        text = call.encode()
        if len(text) > _DESCRIPTION:  # what is cut off shall count
            text = text[: _DESCRIPTION - 12] + f" ...{zlib.crc32(text):08x}".encode()
        text = text.ljust(_DESCRIPTION)
        everything = np.empty((self.size, _DESCRIPTION), np.uint8)
        everything[self.rank] = np.frombuffer(text, np.uint8)
        theirs = {peer: everything[peer] for peer in self.peers}
        own = dict.fromkeys(self.peers, everything[self.rank])
        yield self.channel().exchange(theirs, own, "comparing calls")
        return [row.tobytes().decode(errors="replace").rstrip() for row in everything]

    @property
    def is_usable(self) -> bool:
        return self._problem is None and self.mpi != MPI.COMM_NULL

    # -- the end -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if nothing can be received any more."""
        if self._problem is not None:
            raise CollectiveTimeout(f"this communicator is broken: {self._problem}")
        if self.mpi == MPI.COMM_NULL:
            raise ConfigError("this communicator was freed")

    def give_up(self, problem: str, lost: Iterable[Any]) -> None:
        """Nothing can be received reliably any more; ``lost`` still owns buffers that MPI may
        write to."""
        if self._problem is None:
            self._problem, self.handles.is_broken = problem, True
            _broken.append(self)
        self.handles.kept += lost


class _Tuning:
    """The measured speed of collectives, which a communicator shares with its duplicates."""

    def __init__(self) -> None:
        self.set(None)

    def set(self, model: Any) -> None:
        self.model = model
        known = "" if model is None else f" by model {zlib.crc32(repr(model).encode()):08x}"
        self.auto = f"auto{known}"


#: what calls take: ``None`` means all ranks
Comm = MPI.Comm | Communicator | None


def _option(given: float | None, variable: str, default: float) -> float:
    return number_from_environment(variable, default) if given is None else given


def _duplicated(comm: MPI.Comm) -> Algorithm:
    duplicate, request = comm.Idup()
    yield Wait([request], COLLECTIVE, "MPI_Comm_idup")
    return duplicate


def _texts_of_all(comm: MPI.Comm, text: str) -> Algorithm:
    """Return the texts of all ranks.  By MPI's own collectives, whose messages are not taken for
    the caller's on the caller's communicator."""
    own = encode_bytes(text.encode(), _OPTIONS)
    sizes = np.empty(comm.size, "<i8")
    request = comm.Iallgather(np.array([own.size], "<i8"), sizes)
    yield Wait([request], COLLECTIVE, "comparing options")
    everything = np.empty(sizes.sum(), np.uint8)
    request = comm.Iallgatherv([own, MPI.BYTE], [everything, sizes.tolist(), MPI.BYTE])
    yield Wait([request], COLLECTIVE, "comparing options")
    return [theirs.decode() for theirs in decode_end_to_end(everything, _OPTIONS)]


_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()
_broken: list[Communicator] = []


@functools.cache
def _keyval() -> int:
    return MPI.Comm.Create_keyval(delete_fn=_forget)


def _forget(comm: MPI.Comm, keyval: int, ours: Communicator) -> None:
    if not MPI.Is_finalized():
        ours.free()


@atexit.register
def _leave() -> None:
    """End the process.  MPI_Finalize would wait for ranks that do not answer.  After an error of
    this rank alone the others would wait for it until the time-out, be it before they have met.

    Others may be about to report too, and most launchers end the whole job when the first process
    goes.
    """
    is_broken = bool(_broken)
    ends_by_error = hasattr(sys, "last_value") and not hasattr(sys, "ps1")  # and not interactive
    is_over = MPI.Is_finalized()
    if is_broken or (ends_by_error and not is_over and MPI.COMM_WORLD.size > 1):
        shortest = min((comm.timeout for comm in [*_alive, *_broken]), default=1.0) / 2
        end_at_once(min(5.0 if is_broken else 1.0, shortest))
    if not is_over:
        notes.leave(unfreed, notes.ENDED)
