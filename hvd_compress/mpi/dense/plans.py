"""Small arrays, whose time is that of rounds of messages and of the Python around them: what an
algorithm does with arrays of one kind is recorded once, and repeated.

A plan has buffers of its own, and MPI's persistent requests for the messages between them.  It
makes the same additions in the same order as the algorithm, and a call copies the array in, starts
and awaits the requests, and copies the result out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from hvd_compress.mpi.transport.arrays import Flat
from hvd_compress.mpi.transport.communicator import Channel, Communicator
from hvd_compress.mpi.transport.progress import Message, Wait, complete_wait
from hvd_compress.mpi.transport.reduction import Reduction

#: the bytes of the largest array, and the number of kinds that a communicator has plans for
LARGEST, KINDS = 64 * 1024, 64
#: counted from the end of a communicator's tags, of which the last one is for notes
_TAG = 2


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
        reduction = _Recorded(self._steps, op, dtype, comm.size)
        self._x, self._out = reduction.scratch_of_dtype(n), reduction.scratch_of_dtype(n)
        channel = _Recorder(comm, comm.tags - _TAG)
        for wait in algorithm(channel, self._x, self._out, reduction):
            self._start(channel)
            self._steps.append(functools.partial(self._await, wait))
        self._start(channel)
        self._requests, self._bytes = channel.requests, channel.bytes_sent
        comm.bytes_sent -= self._bytes  # nothing has been sent yet

    def _start(self, channel: _Recorder) -> None:
        if started := channel.started():
            self._steps += [request.Start for request in started]

    def _await(self, wait: Wait) -> None:
        complete_wait(self._comm, wait, self._call)

    def run(self, x: np.ndarray, out: np.ndarray, call: object) -> None:
        """Reduce ``x`` into ``out``, which may be ``x``; ``call`` is for messages."""
        self._comm.check()
        self._call = call
        self._x[:] = x
        try:
            for step in self._steps:
                step()
        except BaseException as error:  # MPI may go on writing to the buffers
            self._comm.give_up(f"{call}: {error!r}", [self])
            raise
        self._comm.bytes_sent += self._bytes
        out[:] = self._out

    def free(self) -> None:
        for request in self._requests:
            request.Free()


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
    """Notes what is to be computed."""

    def __init__(self, steps: list[Callable[[], object]], op: str, dtype: str, size: int) -> None:
        super().__init__(op, dtype, size)
        self._steps, self._real = steps, Reduction(op, dtype, size)

    def widen(self, x: Any, out: Any) -> None:
        self._steps.append(functools.partial(self._real.widen, x, out))

    def combine(self, partial: Any, x: Any) -> None:
        self._steps.append(functools.partial(self._real.combine, partial, x))

    def merge(self, partial: Any, other: Any) -> None:
        self._steps.append(functools.partial(self._real.merge, partial, other))

    def complete(self, partial: Any, x: Any, out: Any) -> None:
        self._steps.append(functools.partial(self._real.complete, partial, x, out))

    def finish(self, partial: Any, out: Any) -> None:
        self._steps.append(functools.partial(self._real.finish, partial, out))


def plan_of(
    comm: Communicator, name: str, algorithm: Callable[..., Any], op: str, flat: Flat
) -> Plan:
    """Return the plan for arrays like ``flat``, which the first call makes."""
    kind = name, op, flat.dtype, len(flat.array)
    plan = comm.plans.pop(kind, None)
    if plan is None:
        if len(comm.plans) >= KINDS:  # the one whose last use is longest ago
            comm.plans.pop(next(iter(comm.plans))).free()
        plan = Plan(comm, algorithm, op, flat.dtype, len(flat.array))
    comm.plans[kind] = plan
    return plan
