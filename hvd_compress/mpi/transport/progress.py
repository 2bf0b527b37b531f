"""How collectives wait: algorithms are generators that yield what they wait for.

An algorithm never blocks.  It starts messages and yields a :class:`Wait`; its caller resumes it
when these are complete.  So one algorithm serves blocking calls, several blocks of one array in
flight at once, and an engine that overlaps with the backward pass.  Every wait ends, because
:class:`Work` knows which rank is waited for and for how long.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

from mpi4py import MPI

from hvd_compress.errors import CollectiveTimeout, CompressionError, MismatchError
from hvd_compress.mpi.transport import notes

logger = logging.getLogger("hvd_compress")

#: looks before the first one at the clock: most small messages come sooner
_LOOKS = 200
#: seconds after which there are no more of them, and looks between two looks at the clock for that
_SOON, _CLOCK_EVERY = 0.02, 16
#: seconds after which waiting ranks sleep between looks: small messages come soon, and large ones
#: need the processor themselves
_SPIN, _SPIN_BULK = 5e-4, 5e-5
#: seconds of a sleep, and the part of the time already waited that it may take when that is more
_NAP, _NAP_SHARE = 5e-5, 2e-4
#: seconds between two looks at who has ended, and for which a rank waits for what such a one may
#: have sent
_ENDS_EVERY, _LATE = 0.02, 1.0
#: what a :class:`Wait` knows of one of MPI's own collectives, whose messages only MPI knows
COLLECTIVE = [(-1, 0, False)]
#: looks after which all other works are moved on too, since other ranks may wait for them
_OTHERS_EVERY = 16


class Wait:
    """Messages that an algorithm waits for, with a description for the error if they do not arrive.

    Args:
        requests: MPI's.
        messages: of each, the rank at its other end, its bytes, which are checked, and whether it
            comes.  :data:`COLLECTIVE` stands for one of MPI's own collectives.
        phase: the name of the phase, such as "reduce-scatter".
        step: the number of the round, counted from 1, and the number of rounds of the phase.
        is_bulk: some message is large.
    """

    __slots__ = ("is_bulk", "is_over", "messages", "phase", "requests", "statuses", "step")

    def __init__(
        self,
        requests: list[Any],
        messages: Sequence[tuple[int, int, bool]],
        phase: str,
        step: tuple[int, int] = (1, 1),
        is_bulk: bool = False,
    ) -> None:
        self.requests, self.messages = requests, messages
        self.phase, self.step = phase, step
        self.statuses: list[Any] = []  # mpi4py appends them
        self.is_bulk, self.is_over = is_bulk, False

    def poll(self) -> bool:
        """Make progress, and return whether all messages are complete."""
        try:
            if not MPI.Request.Testall(self.requests, self.statuses):
                return False
        except MPI.Exception as error:
            bad = {
                peer
                for (peer, _, comes), status in zip(self.messages, self.statuses, strict=True)
                if comes and MPI.Get_error_class(status.Get_error()) == MPI.ERR_TRUNCATE
            }
            if not bad:
                raise
            raise MismatchError(
                f"{_ranks(sorted(bad))} sent more than was expected in {self.phase}: {_DIFFER}"
            ) from error
        for (peer, size, comes), status in zip(self.messages, self.statuses, strict=True):
            if comes and status.Get_count(MPI.BYTE) != size:
                raise MismatchError(
                    f"rank {peer} sent {status.Get_count(MPI.BYTE)} bytes where {size} were "
                    f"expected in {self.phase}: {_DIFFER}"
                )
        self.is_over = True
        return True

    def _missing(self, comes: bool) -> set[int]:
        """Return the ranks whose messages are not here, or have not left."""
        # A test would take the status, in which the size of what has come in is.
        return {
            message[0]
            for request, message in zip(self.requests, self.messages, strict=True)
            if message[2] == comes and not request.Get_status()
        } - {-1}

    @property
    def awaited(self) -> set[int]:
        """The ranks without whose messages it cannot end; empty where MPI alone knows them."""
        return self._missing(True)

    def describe(self) -> str:
        """Return, as text, the ranks that this rank waits for and the place in the algorithm."""
        sources, targets = sorted(self._missing(True)), sorted(self._missing(False))
        parts = []
        if sources:
            parts.append(f"for a message from {_ranks(sources)}")
        if targets:
            parts.append(f"for {_ranks(targets)} to take a message")
        step, steps = self.step
        where = self.phase if steps == 1 else f"{self.phase}, round {step} of {steps}"
        return f"waits {' and '.join(parts) or 'for the other ranks'} ({where})"


_DIFFER = (
    "the ranks' arrays differ in shape or dtype, or their options or calls, or a gradient is "
    "sparse on some ranks and dense on others"
)

Algorithm = Generator["Wait | Work", None, Any]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Work:
    """Algorithms in flight, up to ``depth`` at once.

    Args:
        comm: a :class:`hvd_compress.mpi.Communicator`.
        call: what the user called; its text is made for messages only.
        algorithms: started in this order, which must be the same on all ranks.
        depth: the number in flight: while one adds, messages of the others are on the wire.

    An algorithm may yield another work instead of a :class:`Wait`.  In between it may take
    other collectives, which look at all works under way: at one that moves they look in vain.

    Attributes:
        results: by algorithm, what it has returned.
        note: the end of the description.
    """

    note = ""

    def __init__(
        self, comm: Any, call: object, algorithms: Iterable[Algorithm], depth: int = 1
    ) -> None:
        self.comm, self.call, self._depth = comm, call, depth
        self.results: list[Any] = []
        self.is_over = self._moves = False
        self._waiting = iter(algorithms)
        self._active: list[tuple[int, Algorithm, Wait | Work]] = []
        comm.under_way.add(self)
        self.poll()

    def poll(self) -> bool:
        """Make progress where possible, and return whether there was any."""
        if self._moves or self.is_over:
            return False
        progress, self._moves, active = False, True, self._active
        ready: list[tuple[int, Algorithm]] = []
        try:
            for entry in list(active):
                number, algorithm, wait = entry
                progress |= wait.poll()
                if wait.is_over:
                    active.remove(entry)
                    ready.append((number, algorithm))
            while ready or len(active) < self._depth:
                if ready:
                    number, algorithm = ready.pop(0)
                elif new := next(self._waiting, None):
                    number, algorithm = len(self.results), new
                    self.results.append(None)
                else:
                    break
                progress = True
                try:
                    active.append((number, algorithm, next(algorithm)))
                except StopIteration as stop:
                    self.results[number] = stop.value
        except BaseException as error:
            if active or ready:  # messages are in flight, to buffers that these own
                self.comm.give_up(f"{self.call}: {error!r}", [self])
            raise
        finally:
            self._moves = False
            if not active:
                self.is_over = True
                self.comm.under_way.discard(self)
        return progress

    @property
    def is_bulk(self) -> bool:
        """Whether only large messages are waited for."""
        return all(wait.is_bulk for _, _, wait in self._active)

    def wait(self) -> list[Any]:
        """Wait for the algorithms, and return their results in order.

        Raises:
            CollectiveTimeout: nothing moved for ``comm.timeout`` seconds.
        """
        wait_for(self.comm, [self])
        return self.results

    @property
    def awaited(self) -> set[int]:
        return set[int]().union(*(wait.awaited for _, _, wait in self._active))

    def describe(self) -> str:
        what = self._active[0][2].describe() if self._active else "waits for nothing"
        return what + self.note

    def close(self) -> None:
        """End the algorithms where they are."""
        for _, algorithm, _ in self._active:
            algorithm.close()


def _looks(count: int) -> Iterator[None]:
    """Yield for each of a number of looks, or of fewer if they take long.  MPI may let others have
    the processor in each: a time slice of every process that is ready."""
    end = time.monotonic() + _SOON
    for look in range(1, count + 1):
        yield
        if look % _CLOCK_EVERY == 0 and time.monotonic() > end:
            return


def wait_for(comm: Any, works: Sequence[Work]) -> None:
    """Drive several jobs to their end, whichever moves first."""
    try:
        while open_works := [work for work in works if not work.is_over]:
            if not _poll(open_works):
                _linger(comm, open_works)
    except CompressionError:
        raise
    except BaseException as error:  # Ctrl-C: MPI goes on writing to the buffers of these
        comm.give_up(f"interrupted by {error!r}", works)
        raise


def _poll(works: Sequence[Work]) -> bool:
    """Make progress with all of them, not until the first.  Return whether there was any, or one is
    over, as others may have made it."""
    moved = False
    for work in works:
        moved |= work.poll() or work.is_over
    return moved


def _linger(comm: Any, works: Sequence[Work]) -> None:
    """Wait until one of the jobs has moved."""
    is_bulk = all(work.is_bulk for work in works)
    if not is_bulk and len(comm.under_way) <= len(works):
        for _ in _looks(_LOOKS):
            if _poll(works):
                return
    start, looks, warned, since_end, next_ends = time.monotonic(), 0, False, None, _ENDS_EVERY
    while not _poll(works):
        looks += 1
        if looks % _OTHERS_EVERY == 0:
            for other in comm.under_way.difference(works):
                other.poll()
        idle = time.monotonic() - start
        if idle < (_SPIN_BULK if is_bulk else _SPIN):
            os.sched_yield()
            continue
        time.sleep(max(_NAP, min(_NAP_SHARE * idle, 20 * _NAP)))
        if since_end is None and idle > next_ends:
            next_ends = idle + _ENDS_EVERY
            if _waits_in_vain(comm, works):
                since_end = idle
        if since_end is not None and idle > since_end + _LATE:
            _end(comm, works)
        if idle > comm.timeout:
            _give_up(comm, works)
        if idle > comm.patience and not warned:
            warned = True
            notes.leave_elsewhere(comm, f"waits in {works[0].call}")
            logger.warning("%s", _report(comm, works[0], comm.patience))
    if warned:
        notes.leave_elsewhere(comm, "")


def _waits_in_vain(comm: Any, works: Sequence[Work]) -> bool:
    """Return whether the program of a rank has ended from which messages are to come.

    MPI's own collectives may need ranks no more at their end: then, whether all others have ended.
    """
    if not (ended := notes.ended(comm)):
        return False
    return len(ended) == comm.size - 1 or any(ended & work.awaited for work in works)


def _report(comm: Any, work: Work, seconds: float) -> str:
    return (
        f"rank {comm.rank} of {comm.size} on {MPI.Get_processor_name()}: nothing has moved for "
        f"{seconds:g} s in {work.call}; {work.describe()}"
    )


def _end(comm: Any, works: Sequence[Work]) -> None:
    message = (
        f"rank {comm.rank} of {comm.size} cannot go on in {works[0].call}; "
        f"{works[0].describe()}{notes.told(comm)}"
    )
    # Some wait for this rank, and not for the one that has ended.
    notes.leave([comm.handles], notes.GAVE_UP)
    comm.give_up(message, works)
    raise MismatchError(message)


def _give_up(comm: Any, works: Sequence[Work]) -> None:
    message = (
        f"{_report(comm, works[0], comm.timeout)}{notes.told(comm)}. That rank or the network to "
        "it is down or very slow, or it waits elsewhere: look for its own message; or its arrays "
        "have other sizes. A longer time-out: HVD_COMPRESS_TIMEOUT=seconds, or "
        "Communicator(timeout=...)"
    )
    comm.give_up(message, works)
    raise CollectiveTimeout(message)
