"""MPI inside one process: every number of ranks, and every order in which messages may arrive.

``Simulation(7, "random", seed=1).run(function)`` calls ``function`` once for each of 7 ranks, with
the package's own code on top of a stand-in for ``mpi4py.MPI``.  Ranks are threads of which one runs
at a time; where a rank would wait, the simulation decides what happens next: a message arrives, or
a rank looks at what has arrived for it.  ``order`` says how it decides:

============  ====================================================================================
"first"       messages arrive in the order in which they were sent
"last"        nothing arrives while any rank can go on; then what was sent last
"random"      messages and ranks by chance, from ``seed``
"slow"        as "random", but one rank, of ``seed``, goes on only if nothing else can happen
============  ====================================================================================

It is stricter than an MPI: a send is complete when the message arrives and no sooner, buffers to
receive in are overwritten at once, a buffer that changes while it is being sent is an error, so is
a message that another algorithm than the one it was sent by receives, and so is a message that
nobody receives.  There is no clock: when nothing can happen any more, time passes until the
package's own time-outs say who waits for whom.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import mpi4py
import numpy as np

from hvd_compress.mpi.collectives import measuring
from hvd_compress.mpi.transport import channel as channels
from hvd_compress.mpi.transport import communicator, handles, nodes, notes, progress

ORDERS = ("first", "last", "random", "slow")
IN_PLACE, UNDEFINED = mpi4py.MPI.IN_PLACE, -1


class SimulationError(AssertionError):
    """The code under test broke a rule of MPI."""


class _Stopped(BaseException):
    """Another rank has failed, so this one ends too."""


class Request:
    """A request of one message, or of this rank's part in a collective."""

    def __init__(self, simulation: Simulation, count: int = 0) -> None:
        self.simulation, self.rank = simulation, simulation.current
        self.is_done, self.error, self.count = False, 0, count
        self.watch: list[int] | None = None

    def complete(self) -> None:
        self.is_done = True
        if self.watch is not None:
            self.watch[0] -= 1
            if not self.watch[0]:
                self.simulation.wake(self.rank)

    def Test(self) -> bool:  # noqa: N802
        return self.is_done

    def Get_status(self) -> bool:  # noqa: N802
        return self.is_done

    def Wait(self) -> None:  # noqa: N802
        while not self.Testall([self], [Status()]):
            self.simulation.pause()

    @staticmethod
    def Testall(requests: list[Request], statuses: list[Status]) -> bool:  # noqa: N802
        missing = [request for request in requests if not request.is_done]
        if missing:
            watch = [len(missing)]
            for request in missing:
                request.watch = watch
            return False
        statuses += [Status() for _ in requests[len(statuses) :]]  # as mpi4py does
        for request, status in zip(requests, statuses, strict=True):
            status.error, status.count = request.error, request.count
        if any(request.error for request in requests):
            raise TruncatedError
        return True


class TruncatedError(Exception):
    """A message was longer than the buffer for it."""


class Status:
    error = count = 0

    def Get_error(self) -> int:  # noqa: N802
        return self.error

    def Get_count(self, datatype: Any) -> int:  # noqa: N802
        return self.count


class _Message:
    """One half of a message: what is sent, or where it is received."""

    def __init__(self, request: Request, array: Any, opening: Any) -> None:
        self.request, self.array, self.opening = request, _bytes(array), opening


def _bytes(array: Any) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array.reshape(-1).view(np.uint8)
    if hasattr(array, "untyped_storage"):  # a tensor of torch
        torch = __import__("torch")
        return array.reshape(-1).view(torch.uint8).numpy()
    return np.frombuffer(array, np.uint8)


class _Group:
    """The part that the handles of one communicator share."""

    def __init__(self, members: list[int]) -> None:
        self.members = members  # of the world, by their rank here
        self.calls: dict[int, dict[int, Any]] = collections.defaultdict(dict)
        self.made: dict[Any, _Group] = {}


class Comm:
    """One rank's handle of a communicator."""

    _keys = itertools.count()
    _forget: dict[int, Any] = {}

    def __init__(self, simulation: Simulation, group: _Group) -> None:
        self.simulation, self.group = simulation, group
        self.rank, self.size = group.members.index(simulation.current), len(group.members)
        self.calls, self.is_freed = 0, False
        self.attributes: dict[int, Any] = {}

    def __eq__(self, other: Any) -> bool:
        return self is other or (other is NULL and self.is_freed)

    __hash__ = object.__hash__

    # -- messages ------------------------------------------------------------------------------

    def Isend(self, message: Any, to: int, tag: int = 0) -> Request:  # noqa: N802
        return self.simulation.post(self, message, self.rank, to, tag, True)

    def Irecv(self, message: Any, source: int, tag: int = 0) -> Request:  # noqa: N802
        return self.simulation.post(self, message, source, self.rank, tag, False)

    def Send(self, message: Any, to: int, tag: int = 0) -> None:  # noqa: N802
        self.Isend(message, to, tag).Wait()

    # -- collectives ---------------------------------------------------------------------------

    def allgather(self, value: Any) -> list[Any]:
        number, self.calls = self.calls, self.calls + 1
        call = self.group.calls[number]
        call[self.rank] = value
        if len(call) == self.size:
            for member in self.group.members:
                self.simulation.wake(member)
        while len(call) < self.size:
            self.simulation.pause()
        return [call[rank] for rank in range(self.size)]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value)[root]

    def allreduce(self, value: Any) -> Any:
        return sum(self.allgather(value)[1:], self.allgather(value)[0])

    def Allreduce(self, source: Any, total: np.ndarray) -> None:  # noqa: N802
        assert source is IN_PLACE
        total[...] = np.sum(self.allgather(total.copy()), axis=0)

    def Barrier(self) -> None:  # noqa: N802
        self.allgather(None)

    def Iallgather(self, own: np.ndarray, everything: np.ndarray) -> Request:  # noqa: N802
        return self._gather(own, everything)

    def Iallgatherv(self, own: list[Any], everything: list[Any]) -> Request:  # noqa: N802
        return self._gather(own[0], everything[0])

    def _gather(self, own: np.ndarray, everything: np.ndarray) -> Request:
        def concatenate(own: dict[int, np.ndarray]) -> np.ndarray:
            return np.concatenate([own[rank] for rank in range(self.size)])

        def put(result: np.ndarray) -> None:
            everything[...] = result

        return self._together(own, concatenate, put)

    def _together(
        self, own: Any, make: Callable[[dict[int, Any]], Any], take: Callable[[Any], None]
    ) -> Request:
        """A collective whose ranks ``take`` what the last one to come makes of what all bring."""
        number, self.calls = self.calls, self.calls + 1
        request = Request(self.simulation)
        call = self.group.calls[number]
        call[self.rank] = own, take, request
        if len(call) == self.size:
            result = make({rank: brought for rank, (brought, _, _) in call.items()})
            for _, take_it, theirs in call.values():
                take_it(result)
                theirs.complete()
        return request

    # -- making and freeing --------------------------------------------------------------------

    def Split(self, color: int, key: int = 0) -> Any:  # noqa: N802
        number = self.calls
        colors = self.allgather(color)
        if color == UNDEFINED:
            return NULL
        members = [m for m, c in zip(self.group.members, colors, strict=True) if c == color]
        group = self.group.made.setdefault((number, color), _Group(members))
        return Comm(self.simulation, group)

    def Idup(self) -> tuple[Comm, Request]:  # noqa: N802
        number = self.calls
        group = self.group.made.setdefault(number, _Group(self.group.members))
        return Comm(self.simulation, group), self._together(None, dict, lambda _: None)

    def Split_type(self, kind: int, key: int = 0) -> Comm:  # noqa: N802
        return self.Split(self.simulation.machine_of(self.group.members[self.rank]))

    def Free(self) -> None:  # noqa: N802
        for key, value in self.attributes.items():
            if self._forget[key] is not None:
                self._forget[key](self, key, value)
        self.is_freed = True

    def Is_inter(self) -> bool:  # noqa: N802
        return False

    def Set_errhandler(self, handler: Any) -> None:  # noqa: N802
        pass

    @classmethod
    def Create_keyval(cls, *, delete_fn: Any = None) -> int:  # noqa: N802
        key = next(cls._keys)
        cls._forget[key] = delete_fn
        return key

    def Get_attr(self, key: Any) -> Any:  # noqa: N802
        return self.simulation.largest_tag if key == "TAG_UB" else self.attributes.get(key)

    def Set_attr(self, key: int, value: Any) -> None:  # noqa: N802
        self.attributes[key] = value


NULL = object()


class Simulation:
    """An MPI of ``size`` ranks.

    Args:
        size: ranks.
        order: one of ``ORDERS``, see above.
        seed: of what is left to chance.
        ranks_per_machine: so many consecutive ranks share memory; ``None`` for all.
        largest_tag: of this MPI.
    """

    def __init__(
        self,
        size: int,
        order: str = "first",
        seed: int = 0,
        *,
        ranks_per_machine: int | None = None,
        largest_tag: int = 2**30 - 1,
    ) -> None:
        self.size, self.order, self.largest_tag = size, order, largest_tag
        self.machine_of = lambda rank: rank // (ranks_per_machine or size)
        self.current, self.now = 0, 0.0
        self.delivered = 0
        self._random = random.Random(seed)
        self._slow = seed % size if order == "slow" else None
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._awake = set(range(size))
        self._running = set(range(size))
        self._arriving: list[tuple[_Message, _Message]] = []
        self._unmatched: dict[Any, collections.deque[tuple[bool, _Message]]] = {}
        self._openings: collections.Counter[Any] = collections.Counter()
        self.opening: Any = None  # of the channel that posts messages just now
        self._error: tuple[int, BaseException] | None = None
        self._lull = 0.1
        self._worlds: list[Comm] = []

    # -- what happens next ---------------------------------------------------------------------

    def wake(self, rank: int) -> None:
        if rank in self._running:
            self._awake.add(rank)

    def pause(self, seconds: float = 0.0) -> None:
        """The rank that runs has nothing to do for now."""
        me = self.current
        if self._error is not None:
            raise _Stopped
        self._awake.discard(me)
        self._pass_on()
        if self.current != me:
            self._hand_over(self.current)
            self._gates[me].acquire()
        self._awake.discard(me)
        if self._error is not None:
            raise _Stopped

    def _pass_on(self) -> None:
        """Let messages arrive until a rank is to go on: it becomes the current one."""
        while True:
            if not self._awake and not self._arriving:
                # Nothing can happen: time passes, more and more of it.
                self.now += self._lull
                self._lull *= 1.5
                self._awake |= self._running
            rank = self._choose()
            if rank is not None:
                self.current = rank
                return

    def _choose(self) -> int | None:
        """A rank to go on, or ``None`` after a message has arrived."""
        arriving, awake = self._arriving, sorted(self._awake - {self._slow})
        if self.order == "first":
            if not arriving:
                return min(self._awake)
            self._deliver(arriving.pop(0))
            return None
        if self.order == "last":
            if awake:
                return awake[-1]
            self._deliver(arriving.pop())
            return None
        number = self._random.randrange(len(arriving) + len(awake)) if arriving or awake else None
        if number is None:
            return self._slow
        if number < len(awake):
            return awake[number]
        number -= len(awake)
        arriving[number], arriving[-1] = arriving[-1], arriving[number]
        self._deliver(arriving.pop())
        return None

    def _hand_over(self, rank: int) -> None:
        self._gates[rank].release()

    # -- messages ------------------------------------------------------------------------------

    def post(
        self,
        comm: Comm,
        message: Any,
        source: int,
        to: int,
        tag: int,
        is_send: bool,
    ) -> Request:
        array, size = (message[0], message[1]) if isinstance(message, list) else (message, None)
        request = Request(self)
        half = _Message(request, array, self.opening)
        if size is not None and size != half.array.nbytes:
            raise SimulationError(f"{size} bytes are announced of {half.array.nbytes}")
        if is_send:
            half.kept = half.array.copy()
        else:
            half.array[...] = 0xA5
        key = comm.group, source, to, tag
        line = self._unmatched.setdefault(key, collections.deque())
        if line and line[0][0] != is_send:
            other = line.popleft()[1]
            if not line:
                del self._unmatched[key]
            if half.opening != other.opening:
                raise SimulationError(
                    f"a message from rank {source} to rank {to} was sent by one algorithm and "
                    f"received by another: {half.opening} and {other.opening}"
                )
            self._arriving.append((half, other) if is_send else (other, half))
        else:
            line.append((is_send, half))
        return request

    def _deliver(self, pair: tuple[_Message, _Message]) -> None:
        sent, received = pair
        if sent.array.tobytes() != sent.kept.tobytes():
            self._fail(SimulationError("an array was changed while it was being sent"))
            return
        count = received.array.nbytes
        if sent.array.nbytes > count:
            received.request.error = 1
        received.array[: sent.array.nbytes] = sent.array[:count]
        received.request.count = min(sent.array.nbytes, count)
        self._lull = 0.1
        self.delivered += 1
        sent.request.complete()
        received.request.complete()

    # -- ranks ---------------------------------------------------------------------------------

    def run(self, function: Callable[[], Any], *, may_leave: bool = False) -> list[Any]:
        """Call ``function`` on every rank; the results.  ``hvd_compress.mpi`` and ``from mpi4py
        import MPI`` use this simulation meanwhile.

        Args:
            may_leave: messages that nobody receives are no error; those of communicators that were
                given up never are.

        Raises:
            The first error of a rank, with a note that says which.
        """
        results = [None] * self.size

        def rank(me: int) -> None:
            self._gates[me].acquire()
            try:
                if self._error is None:
                    results[me] = function()
            except _Stopped:
                pass
            except BaseException as error:
                self._fail(error, me)
            self._running.discard(me)
            self._awake.discard(me)
            if self._error is not None:
                self._awake = set(self._running)
                self.current = min(self._running, default=0)
            elif self._running:
                self._pass_on()
            if self._running:
                self._hand_over(self.current)

        threads = [
            threading.Thread(target=rank, args=(me,), daemon=True) for me in range(self.size)
        ]
        with self._in_place_of_mpi() as broken:
            for thread in threads:
                thread.start()
            self._pass_on()
            self._hand_over(self.current)
            for thread in threads:
                thread.join()
        if self._error is not None:
            me, error = self._error
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"on rank {me} of {self.size}, order {self.order!r}")
            raise error
        given_up = {comm.mpi.group for comm in broken}
        left = [key for key in self._unmatched if key[0] not in given_up]
        if left and not may_leave:
            raise SimulationError(
                "messages that have no counterpart: "
                + ", ".join(f"from rank {source} to rank {to}" for _, source, to, _ in left)
            )
        return results

    def _fail(self, error: BaseException, rank: int | None = None) -> None:
        if self._error is None:
            self._error = (self.current if rank is None else rank, error)
            self._awake |= self._running

    @property
    def world(self) -> Comm:
        """The handle of the rank that runs."""
        if not self._worlds:
            group, before = _Group(list(range(self.size))), self.current
            for rank in range(self.size):
                self.current = rank
                self._worlds.append(Comm(self, group))
            self.current = before
        return self._worlds[self.current]

    def _in_place_of_mpi(self) -> ExitStack:
        """The patches; what is entered are the communicators of the package that are given up."""
        simulation = self

        class Library:
            """The part of ``mpi4py.MPI`` that the package uses."""

            Comm, Request, Status, Exception = Comm, Request, Status, TruncatedError
            Op = types.SimpleNamespace(Create=lambda function, commute: "max")
            COMM_NULL, SUM, BYTE = NULL, "sum", "byte"
            UNDEFINED, COMM_TYPE_SHARED, TAG_UB = UNDEFINED, 0, "TAG_UB"
            IN_PLACE, ERRORS_RETURN, ERR_TRUNCATE = IN_PLACE, 0, 1
            THREAD_SERIALIZED = THREAD_MULTIPLE = 3
            Query_thread = staticmethod(lambda: 3)
            Is_finalized = staticmethod(lambda: False)
            Get_error_class = staticmethod(lambda error: error)

            @property
            def COMM_WORLD(self) -> Comm:  # noqa: N802
                return simulation.world

            def Get_processor_name(self) -> str:  # noqa: N802
                return f"machine-{simulation.machine_of(simulation.current)}"

        library = Library()
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.pause)
        system = types.SimpleNamespace(sched_yield=self.pause)
        open_channel, exchange = channels.Channel.__init__, channels.Channel.exchange

        def opened(channel: Any, comm: Any, tag: int) -> None:
            open_channel(channel, comm, tag)
            key = comm.mpi.group, tag, simulation.current
            self._openings[key] += 1
            channel.opening = tag, self._openings[key]

        def posting(channel: Any, *arrays: Any) -> Any:
            self.opening = channel.opening
            try:
                return exchange(channel, *arrays)
            finally:
                self.opening = None

        class Ever(list[Any]):
            """Keeps those that are freed, too: their messages may be left over all the same."""

            def remove(self, comm: Any) -> None:
                pass

        broken = Ever()
        patches = [mock.patch.object(module, "MPI", library) for module in _USERS]
        patches += [
            mock.patch.multiple(progress, time=clock, os=system, _OTHERS_EVERY=1, _LOOKS=1),
            mock.patch.multiple(
                communicator, _broken=broken, _keyval=_uncached(communicator._keyval)
            ),
            mock.patch.object(handles, "_key", _uncached(handles._key)),
            # All ranks are in one process, which does not end between them.
            mock.patch.multiple(notes, leave=mock.DEFAULT, read=lambda comm: {}),
            # Nothing is measured here; times are needed all the same, of few messages.
            mock.patch.multiple(measuring, _SIZES=(8, 64), _COUNTS=(16, 32)),
            mock.patch.object(
                measuring, "measure", functools.partial(measuring.measure, repeats=1)
            ),
            mock.patch.multiple(channels.Channel, __init__=opened, exchange=posting),
        ]

        class Patched(ExitStack):
            def __enter__(self) -> Any:
                super().__enter__()
                for patch in patches:
                    self.enter_context(patch)
                return broken

        return Patched()


def _uncached(function: Any) -> Any:
    """The function as it was before its first call."""
    return functools.cache(function.__wrapped__)


_USERS = (mpi4py, channels, communicator, handles, nodes, notes, progress)
