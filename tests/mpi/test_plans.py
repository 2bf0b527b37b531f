"""Programs of plans: their additions, and what becomes of messages that are not as expected."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from hvd_compress import kernels
from hvd_compress.errors import MismatchError
from hvd_compress.mpi import MPI
from hvd_compress.mpi.dense import plans
from hvd_compress.mpi.transport import progress
from hvd_compress.mpi.transport.progress import Message, Wait

pytestmark = pytest.mark.skipif(kernels.native is None, reason="the loops are not compiled")

#: each with a NaN of its own
NANS = {
    "float32": np.array([0x7FC00001, 0x7FC00002], "u4").view("f4"),
    "float64": np.array([0x7FF8000000000001, 0x7FF8000000000002], "u8").view("f8"),
}


def pairs(dtype):
    elements = st.floats(width=int(dtype[-2:])) | st.sampled_from([-0.0, np.inf, -np.inf, np.nan])
    return arrays.arrays(dtype, st.tuples(st.just(2), st.integers(0, 70)), elements=elements)


@given(
    pair=st.sampled_from(sorted(NANS)).flatmap(pairs),
    begin=st.integers(0, 3),
    by=st.sampled_from([1, 2, 3, 7]),
    in_place=st.booleans(),
)
def test_sums_and_means_are_numpys(pair, begin, by, in_place):
    x, y = pair[0, begin:].copy(), pair[1, begin:].copy()
    x[:1], y[:1] = NANS[str(x.dtype)]
    with np.errstate(all="ignore"):
        # Of two NaNs the first is left; which one NumPy leaves depends on where arrays lie.
        total, quotient = np.where(np.isnan(x), x, x + y) / by, y / by
    out, other = x if in_place else np.empty_like(x), y if in_place else np.empty_like(y)
    program = plans._new_program()
    program.compute(out.ctypes.data, x.ctypes.data, y.ctypes.data, by, len(x), x.itemsize)
    program.compute(other.ctypes.data, y.ctypes.data, 0, by, len(y), y.itemsize)
    assert program.run(0, 100) == 2
    assert out.tobytes() == total.tobytes()
    assert other.tobytes() == quotient.tobytes()


def test_a_step_that_is_left():
    program = plans._new_program()
    x = np.ones(3)
    program.compute(x.ctypes.data, x.ctypes.data, x.ctypes.data, 1, 3, 8)
    program.leave()
    program.compute(x.ctypes.data, x.ctypes.data, x.ctypes.data, 1, 3, 8)
    assert program.run(0, 100) == 1
    assert (x == 2).all()
    assert program.run(2, 100) == 3
    assert (x == 4).all()
    with pytest.raises(ValueError, match="float32 or float64"):
        program.compute(x.ctypes.data, x.ctypes.data, 0, 1, 3, 2)


@pytest.fixture
def comm():
    own = MPI.COMM_SELF.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    yield own
    own.Free()


def exchange(comm, sent, expected):
    """A program that sends so many bytes to its own rank, where others are expected."""
    incoming, outgoing = np.zeros(expected, np.uint8), np.arange(sent, dtype=np.uint8)
    requests = comm.Recv_init(incoming, 0), comm.Send_init(outgoing, 0)
    messages = [
        Message((request,), 0, (expected,), is_first)
        for request, is_first in zip(requests, (True, False), strict=True)
    ]
    wait, program = Wait(messages, "a test"), plans._new_program()
    addresses = [MPI._addressof(request) for request in requests]
    program.start(addresses)
    statuses = [MPI._addressof(status) for status in wait.statuses]
    program.wait(addresses, [expected, -1], statuses)
    return program, wait, requests, incoming, outgoing


def test_messages_arrive_every_time(comm):
    program, _, requests, incoming, outgoing = exchange(comm, 5, 5)
    for turn in range(3):
        outgoing[:] = turn
        assert program.run(0, 100) == 2
        assert not program.failed
        assert (incoming == turn).all()
    for request in requests:
        request.Free()


def test_a_message_of_another_size(comm):
    program, wait, requests, *_ = exchange(comm, 3, 5)
    assert program.run(0, 100) == 1
    assert program.failed
    with pytest.raises(MismatchError, match="rank 0 sent 3 bytes where 5 were expected in a test"):
        wait.end(MPI.Exception(program.error) if program.error else None)
    for request in requests:
        request.Free()


def test_a_message_that_does_not_come(comm):
    incoming = np.zeros(5, np.uint8)
    request = comm.Recv_init(incoming, 0)
    program, status = plans._new_program(), MPI.Status()
    program.start([MPI._addressof(request)])
    program.wait([MPI._addressof(request)], [5], [MPI._addressof(status)])
    assert program.run(0, 100) == 1
    assert not program.failed
    assert program.run(1, 2**31 - 1) == 1  # not for minutes, whatever a look takes
    comm.Send(np.ones(5, np.uint8), 0)
    assert program.run(1, 0) == 1  # without a look
    assert program.run(1, 100) == 2
    assert (incoming == 1).all()
    request.Free()


def test_looks_end_where_each_takes_long():
    """As where many processes are ready, and MPI lets them have the processor in each."""
    looks = 0
    for _ in progress._looks(1000):
        looks += 1
        time.sleep(0.01)
    assert looks <= 32


def test_as_many_of_each():
    with pytest.raises(ValueError, match="as many sizes and statuses as requests"):
        plans._new_program().wait([], [1], [])
