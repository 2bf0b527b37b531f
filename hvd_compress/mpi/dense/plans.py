"""Small arrays, whose time is that of rounds of messages and of the Python around them: what an
algorithm does with arrays of one kind is recorded once, and repeated.

A plan has buffers of its own, and MPI's persistent requests for the messages between them.  It
makes the same additions in the same order as the algorithm, and a call copies the array in, starts
and awaits the requests, and copies the result out.  Where the loops are compiled, they take the
steps, see kernels/plans.cpp, until a message takes long.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress import kernels
from hvd_compress.mpi.dense.algorithm import Allreduce
from hvd_compress.mpi.transport.arrays import HALVES, Flat
from hvd_compress.mpi.transport.communicator import Channel, Communicator
from hvd_compress.mpi.transport.progress import Message, Wait, complete_wait
from hvd_compress.mpi.transport.reduction import Reduction

#: the bytes of the largest array, and the number of kinds that a communicator has plans for
LARGEST, KINDS = 64 * 1024, 64
#: looks of a program at one wait, before Python waits: most small messages come sooner
_LOOKS = 2000
#: counted from the end of a communicator's tags, of which the last one is for notes
_TAG = 2

#: the algorithm, the operation, the dtype (a text for half precisions), and the number of elements
Kind = tuple[str, str, Any, int]


class Plan:
    """An allreduce of flat arrays of ``n`` elements.

    Args:
        algorithm: yields what it waits for, and looks at no element.
        op, dtype: see :class:`.Reduction`.
    """

    def __init__(
        self, comm: Communicator, algorithm: Callable[..., Any], op: str, dtype: str, n: int
    ) -> None:
        self._comm = comm
        self._call: object = None
        self._steps: list[Callable[[], object]] = []
        self._waits: dict[int, Wait] = {}  # by step
        #: the same steps, which is faster; it leaves to Python those that it cannot take
        self._program = _new_program()
        reduction = _Recorded(self._compute, op, dtype, comm.size)
        self._x, self._out = reduction.scratch_of_dtype(n), reduction.scratch_of_dtype(n)
        channel = _Recorder(comm, comm.tags - _TAG)
        for wait in algorithm(channel, self._x, self._out, reduction):
            self._start(channel)
            self._await(wait)
        self._start(channel)
        self._requests, self._bytes = channel.requests, channel.bytes_sent
        comm.handles.requests[id(self._requests)] = self._requests
        comm.bytes_sent -= self._bytes  # nothing has been sent yet

    def _start(self, channel: _Recorder) -> None:
        if requests := channel.started():
            self._steps.append(functools.partial(_start, requests))
            if self._program is not None:
                self._program.start(list(map(MPI._addressof, requests)))

    def _await(self, wait: Wait) -> None:
        self._waits[len(self._steps)] = wait
        self._steps.append(functools.partial(self._complete, wait))
        if self._program is not None:
            self._program.wait(
                list(map(MPI._addressof, wait.requests)),
                [size if m.incoming else -1 for m in wait.messages for size in m.sizes],
                list(map(MPI._addressof, wait.statuses)),
            )

    def _complete(self, wait: Wait) -> None:
        complete_wait(self._comm, wait, self._call)

    def _compute(self, step: Callable[[], object], compiled: tuple[Any, ...] | None) -> None:
        self._steps.append(step)
        if self._program is not None:
            self._program.leave() if compiled is None else self._program.compute(*compiled)

    def run(self, x: np.ndarray, out: np.ndarray, call: object) -> None:
        """Reduce ``x`` into ``out``, which may be ``x``; ``call`` is for messages."""
        self._comm.check()
        self._call = call
        self._x[:] = x
        try:
            self._run()
        except BaseException as error:  # MPI may go on writing to the buffers
            self._comm.give_up(f"{call}: {error!r}", [self])
            raise
        self._comm.bytes_sent += self._bytes
        out[:] = self._out

    def _run(self) -> None:
        at, end = 0, len(self._steps)
        while at < end:
            if self._program is not None:
                # It moves nothing on but its own messages, and others must not wait for that.
                at = self._program.run(at, 0 if self._comm.under_way else _LOOKS)
                if self._program.failed:
                    self._fail(at)
                if at == end:
                    return
            self._steps[at]()
            at += 1

    def _fail(self, at: int) -> None:
        """Raise what was wrong in a step of the program."""
        error = MPI.Exception(self._program.error) if self._program.error else None
        if at in self._waits:
            self._waits[at].end(error)
        elif error is not None:
            raise error

    def free(self) -> None:
        for request in self._comm.handles.requests.pop(id(self._requests)):
            request.Free()


def _start(requests: list[MPI.Prequest]) -> None:
    for request in requests:
        request.Start()


@functools.cache
def _mpi() -> tuple[Any, ...] | None:
    """Return what a program needs to call MPI, or ``None`` where that is not to be found."""
    names = "MPI_Startall", "MPI_Testall", "MPI_Get_count"
    try:
        library = ctypes.CDLL(MPI.__file__)
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in names]
    except (AttributeError, OSError):
        return None
    return functions, MPI._addressof(MPI.BYTE), MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status)


def _new_program() -> Any:
    mpi = None if kernels.native is None else _mpi()
    return None if mpi is None else kernels.native.plans.Program(*mpi)


class _Recorder(Channel):
    """Makes persistent requests."""

    def __init__(self, comm: Communicator, tag: int) -> None:
        super().__init__(comm, tag)
        self.requests: list[MPI.Prequest] = []
        self._started = 0

    def started(self) -> list[MPI.Prequest]:
        """Return the requests of the messages since the last call."""
        new, self._started = self.requests[self._started :], len(self.requests)
        return new

    def _start(self, begin: Any, array: Any, size: int, peer: int, incoming: bool) -> Message:
        begin = self.comm.mpi.Recv_init if incoming else self.comm.mpi.Send_init
        message = super()._start(begin, array, size, peer, incoming)
        self.requests += message.requests
        return message


class _Recorded(Reduction):
    """Notes what is to be computed: a step for Python, and the arguments of a program's, or
    ``None`` where it has no such step."""

    def __init__(self, note: Callable[..., None], op: str, dtype: str, size: int) -> None:
        super().__init__(op, dtype, size)
        self._note, self._real = note, Reduction(op, dtype, size)
        self._is_compiled = dtype in ("float32", "float64") and op != "max"
        self._divisor = size if op == "mean" else 1

    def widen(self, x: Any, out: Any) -> None:
        self._compute(functools.partial(self._real.widen, x, out), out, x)

    def combine(self, partial: Any, x: Any) -> None:
        self._compute(functools.partial(self._real.combine, partial, x), partial, partial, x)

    def merge(self, partial: Any, other: Any) -> None:
        step = functools.partial(self._real.merge, partial, other)
        self._compute(step, partial, partial, other)

    def add(self, first: Any, second: Any, out: Any) -> None:
        step = functools.partial(self._real.add, first, second, out)
        self._compute(step, out, first, second)

    def complete(self, partial: Any, x: Any, out: Any) -> None:
        step = functools.partial(self._real.complete, partial, x, out)
        self._compute(step, out, partial, x, self._divisor)

    def finish(self, partial: Any, out: Any) -> None:
        step = functools.partial(self._real.finish, partial, out)
        self._compute(step, out, partial, None, self._divisor)

    def _compute(
        self, step: Callable[[], object], out: Any, x: Any, y: Any = None, by: int = 1
    ) -> None:
        """Note ``out = (x + y) / by``."""
        compiled = None
        if self._is_compiled:
            others = 0 if y is None else y.ctypes.data
            compiled = out.ctypes.data, x.ctypes.data, others, by, len(out), out.itemsize
        self._note(step, compiled)


def plan_of(comm: Communicator, algorithm: Allreduce, op: str, flat: Flat) -> Plan:
    """Return the plan for arrays like ``flat``, which the first call makes."""
    dtype = flat.dtype if flat.dtype in HALVES else np.dtype(flat.dtype)
    kind = algorithm.name, op, dtype, len(flat.array)
    plan = known_plan(comm, kind)
    if plan is None:
        if len(comm.plans) >= KINDS:  # the one whose last use is longest ago
            comm.plans.pop(next(iter(comm.plans))).free()
        plan = comm.plans[kind] = Plan(comm, algorithm.run, op, flat.dtype, len(flat.array))
    return plan


def known_plan(comm: Communicator, kind: Kind) -> Plan | None:
    """Return the plan that was made for a kind of arrays, if it is still there."""
    plan = comm.plans.pop(kind, None)
    if plan is not None:
        comm.plans[kind] = plan
    return plan
