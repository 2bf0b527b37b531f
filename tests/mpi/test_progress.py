"""How works move, in one process."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvd_compress import mpi
from hvd_compress.mpi.engine import CARRIERS
from hvd_compress.mpi.transport import progress
from hvd_compress.mpi.transport.progress import Work
from hvd_compress.requests import Sum


class Looks:
    """Messages that have arrived after so many looks."""

    is_bulk, is_over, awaited = False, False, frozenset()

    def __init__(self, count):
        self.left = count

    def poll(self):
        self.left -= 1
        self.is_over = self.left <= 0
        return self.is_over


@pytest.fixture
def comm():
    made = mpi.Communicator(mpi.MPI.COMM_SELF, timeout=5)
    yield made
    made.free()


def test_a_work_that_waits_for_another_while_it_moves_stays_under_way(comm):
    """Whoever waits looks at all works, and so at the one that it is in."""

    def another():
        yield Looks(100)

    def algorithm():
        yield Looks(1)
        comm.run("another", another())
        assert work in comm.under_way
        assert not work.is_over
        yield Looks(2)
        return 7

    work = Work(comm, "a work", [algorithm()])
    assert work.poll()
    assert work in comm.under_way
    assert not work.is_over
    assert work.wait() == [7]
    assert work.is_over
    assert work not in comm.under_way


def test_a_work_with_an_error_moves_no_more(comm):
    def algorithm():
        yield Looks(1)
        raise ZeroDivisionError

    work = Work(comm, "a work", [algorithm()])
    with pytest.raises(ZeroDivisionError):
        work.poll()
    assert work.is_over
    assert work not in comm.under_way
    assert not work.poll()


def test_messages_of_the_first_algorithm_are_kept_if_the_second_does_not_begin(comm):
    def algorithm():
        yield Looks(100)

    def fails():
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        Work(comm, "a work", [algorithm(), fails()], depth=2)
    assert not comm.is_usable
    assert comm.handles.kept


def test_only_an_exchange_ends_itself(monkeypatch):
    """An iterator that is empty by mistake, in what carries a request, is no result."""

    def exchange():
        return (yield Sum(np.ones(3)))

    one = mpi.MpiEngine(mpi.MPI.COMM_SELF)
    one.start("w", exchange())
    np.testing.assert_array_equal(one.finish()["w"], np.ones(3))
    monkeypatch.setitem(CARRIERS, Sum, lambda *_: next(iter(())))
    with pytest.raises(RuntimeError, match="StopIteration"):
        one.start("w", exchange())
    one.close()


def test_looks_end_where_each_takes_long():
    """As where many processes are ready, and MPI lets them have the processor in each."""
    looks = 0
    for _ in progress._looks(1000):
        looks += 1
        time.sleep(0.01)
    assert looks <= 32
