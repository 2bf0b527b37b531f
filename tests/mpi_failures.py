"""``mpirun -np 3 python mpi_failures.py CASE FOLDER``: jobs that go wrong.

Each rank writes the errors that it meets to ``FOLDER/RANK``, a line of JSON for each: what it
called, the error, its message, the seconds until then.  ``mpi/test_failures.py`` reads them.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress import mpi
from hvd_compress.mpi import objects, process_sets
from hvd_compress.reduce import Reducer
from hvd_compress.requests.algorithms import DENSE
from hvd_compress.systems import Coordinator
from hvd_compress.systems.graphs import Diffusion

TIMEOUT = 3.0
#: the rank that does what it should not
CULPRIT = 1


def report(what: str, call: Callable[[], Any]) -> Exception:
    """The error that a call ends with."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        line = [what, type(error).__name__, str(error), time.monotonic() - start]
        with (Path(sys.argv[2]) / str(mpi.MPI.COMM_WORLD.rank)).open("a") as log:
            print(json.dumps(line), file=log)
        return error
    sys.exit(f"{what}: no error")


def stay_until_all_have_reported() -> None:
    """A launcher ends the job when the first rank leaves."""
    mpi.MPI.COMM_WORLD.Barrier()
    sys.exit(1)


def sizes_differ() -> None:
    """And nobody compares the calls."""
    functions: dict[str, Callable[..., Any]] = {
        **{name: functools.partial(mpi.allreduce, algorithm=name) for name in DENSE},
        "hierarchical": lambda x, comm: mpi.allreduce(x, comm=comm, nodes=2, algorithm="ring"),
    }
    for name, function in functions.items():
        for n in (450, 90_000):  # MPI sends short and long messages in different ways
            mpi.MPI.COMM_WORLD.Barrier()  # ranks may start further apart than the time-out
            comm = mpi.Communicator(timeout=TIMEOUT / 2, checks=0)
            x = np.ones(n + n // 9 if comm.rank == CULPRIT else n, np.float32)
            report(f"{name} {n}", lambda f=function, x=x, comm=comm: f(x, comm=comm))
    stay_until_all_have_reported()


def a_rank_sleeps(checks: int) -> None:
    comm = mpi.Communicator(timeout=TIMEOUT, checks=checks)
    if comm.rank == CULPRIT:
        time.sleep(300)
    raise report("ring", lambda: mpi.allreduce(np.ones(1000), algorithm="ring", comm=comm))


def a_rank_does_not_come_to_make_one() -> None:
    """The error of a communicator of the user's, and of ours, where we may say who is missing."""
    comm, theirs = mpi.Communicator(timeout=TIMEOUT), mpi.MPI.COMM_WORLD.Dup()
    if comm.rank == CULPRIT:
        time.sleep(300)
    report("the first", lambda: mpi.Communicator(theirs, timeout=TIMEOUT))
    report("an engine", lambda: mpi.MpiEngine(comm))
    time.sleep(2)  # until the other one has reported
    sys.exit(1)


def a_rank_makes_another_call_than_init() -> None:
    """It has what all others have made until then."""
    if mpi.MPI.COMM_WORLD.rank == CULPRIT:
        comm = mpi.Communicator(timeout=TIMEOUT)
        report("allreduce", lambda: mpi.allreduce(np.ones(3), comm=comm))
    else:
        report("init", process_sets.init)
    stay_until_all_have_reported()


def a_rank_removes_what_others_use() -> None:
    process_sets.init()
    pair = process_sets.add_process_set([0, CULPRIT])
    if mpi.MPI.COMM_WORLD.rank == CULPRIT:
        report("remove", lambda: process_sets.remove_process_set(pair))
    else:
        report("gather", lambda: objects.allgather_object(None))
    stay_until_all_have_reported()


def a_rank_is_killed() -> None:
    comm = mpi.Communicator(timeout=TIMEOUT)
    x = np.ones(4_000_000, np.float32)
    mpi.allreduce(x, algorithm="ring", comm=comm)
    if comm.rank == CULPRIT:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def on_and_on() -> None:
        while True:
            mpi.allreduce(x, algorithm="ring", comm=comm)

    raise report("ring", on_and_on)


def broken_is_broken() -> None:
    """Catching the error does not mend the communicator."""
    comm = mpi.Communicator(timeout=TIMEOUT)
    x = np.ones(10)
    calls = {
        "first": lambda: mpi.allreduce(x, comm=comm, nodes=2),
        "ring": lambda: mpi.allreduce(x, algorithm="ring", comm=comm),
        "hierarchical": lambda: mpi.allreduce(x, comm=comm, nodes=2),
    }
    if comm.rank != CULPRIT:
        for what, call in calls.items():
            report(what, call)
        comm.free()  # waits for nobody
    stay_until_all_have_reported()


def a_node_breaks_the_whole() -> None:
    comm = mpi.Communicator(timeout=TIMEOUT, checks=0)

    def call() -> None:
        mpi.allreduce(np.ones(1000), comm=comm, nodes=2, algorithm="ring")

    call()
    if comm.rank != CULPRIT:
        report("first", call)
        report("second", call)
    stay_until_all_have_reported()


def a_rank_has_an_error_of_its_own() -> None:
    """The others wait for it, with a time-out that is longer than anybody's patience."""
    comm = mpi.Communicator(timeout=600)
    if comm.rank == CULPRIT:
        raise RuntimeError("an error of this rank alone")
    mpi.allreduce(np.ones(10), algorithm="ring", comm=comm)


def a_rank_has_an_error_before_there_is_a_communicator() -> None:
    if mpi.MPI.COMM_WORLD.rank == CULPRIT:
        raise RuntimeError("an error of this rank alone")
    mpi.Communicator(timeout=600)


def streams_are_closed() -> None:
    """When a rank ends, which cannot wait for the one that sleeps."""
    comm = mpi.Communicator(timeout=TIMEOUT)
    if comm.rank == CULPRIT:
        time.sleep(300)
    with Path(os.devnull).open("w") as sys.stdout:
        mpi.allreduce(np.ones(3), comm=comm)


def a_rank_takes_fewer_steps() -> None:
    """A failure in training over a graph."""
    engine = mpi.MpiEngine(mpi.Communicator(timeout=TIMEOUT))
    coordinator = Coordinator(Diffusion("cycle"), engine)

    def steps(count: int) -> None:
        x = {"x": np.ones(10)}
        for _ in range(count):
            x = coordinator.before_step(x)
            x = coordinator.after_step({"x": x["x"] - 0.1})

    if engine.rank == CULPRIT:
        steps(2)
    else:
        report("train", lambda: steps(3))
    stay_until_all_have_reported()


def a_rank_goes_on_with_something_else() -> None:
    """After fewer batches: it evaluates, or makes another optimizer, or ends."""
    engine = mpi.MpiEngine(mpi.Communicator(timeout=TIMEOUT))
    reducer, everyone = Reducer("none", engine), mpi.Communicator(timeout=TIMEOUT)

    def steps(count: int) -> None:
        for _ in range(count):
            reducer.reduce({"w": np.ones(10)})

    if engine.rank == CULPRIT:
        steps(25)
        report("evaluate", lambda: mpi.allreduce(np.ones(3), comm=everyone))
    else:
        report("train", lambda: steps(30))
    stay_until_all_have_reported()


def a_rank_that_is_needed_no_more_ends() -> None:
    """Another one is late, and the third waits for that one."""
    comm, x = mpi.Communicator(timeout=600, checks=0), np.ones(8)
    rank = comm.rank
    if rank == CULPRIT:
        time.sleep(4)
    last = 2 if CULPRIT != 2 else 0
    outgoing = {last: x} if rank == CULPRIT else {}
    arriving = {CULPRIT: np.empty(8)} if rank == last else {}

    def algorithm():
        yield comm.channel().exchange(arriving, outgoing, "a message")

    comm.run("the last call", algorithm())


def a_rank_ends_early() -> None:
    """With objects that are gone by then."""

    def steps(count: int) -> None:
        reducer = mpi.Reducer("none", comm=mpi.Communicator(timeout=600))
        for _ in range(count):
            reducer.reduce({"w": np.ones(10)})

    if mpi.MPI.COMM_WORLD.rank == CULPRIT:
        steps(25)
        return
    report("train", lambda: steps(30))
    time.sleep(2)  # until the other one has reported
    sys.exit(1)


CASES: dict[str, Callable[[], None]] = {
    "sizes": sizes_differ,
    "sleeps": lambda: a_rank_sleeps(checks=20),
    "sleeps-unchecked": lambda: a_rank_sleeps(checks=0),
    "sleeps-making": a_rank_does_not_come_to_make_one,
    "inits": a_rank_makes_another_call_than_init,
    "removes": a_rank_removes_what_others_use,
    "killed": a_rank_is_killed,
    "broken": broken_is_broken,
    "error": a_rank_has_an_error_of_its_own,
    "error-before": a_rank_has_an_error_before_there_is_a_communicator,
    "closed": streams_are_closed,
    "node": a_node_breaks_the_whole,
    "elsewhere": a_rank_goes_on_with_something_else,
    "ends-early": a_rank_ends_early,
    "needed-no-more": a_rank_that_is_needed_no_more_ends,
    "fewer-steps": a_rank_takes_fewer_steps,
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
