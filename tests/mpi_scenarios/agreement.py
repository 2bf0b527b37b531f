"""Calls that differ between ranks are errors on all of them; waiting has an end."""

from __future__ import annotations

import functools
import gc
import os

import numpy as np

from hvd_compress import mpi
from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.mpi.transport import notes
from tests.mpi_scenarios.common import raises, refused, world
from tests.scenarios import applies


@applies(least=2)
def differing_calls_are_errors_everywhere() -> None:
    odd, x = world.rank == world.size - 1, np.ones(3, np.float32)
    comm = mpi.Communicator(world, timeout=20)
    allreduce = functools.partial(mpi.allreduce, comm=comm)
    longer, wider = np.ones(3 + odd, np.float32), np.ones(3, np.float64 if odd else np.float32)
    op, algorithm = "max" if odd else "sum", "direct" if odd else "ring"
    refused(
        MismatchError,
        (lambda: allreduce(longer, algorithm="ring"), r"float32\[3\]", r"float32\[4\]"),
        (lambda: allreduce(wider, algorithm="ring"), "rank 0.*float32", "float64"),
        (lambda: allreduce(x, algorithm="ring", op=op), "sum", "max"),
        (lambda: allreduce(x, algorithm=algorithm), "ring", "direct"),
    )
    # And afterwards the communicator still works.
    assert allreduce(np.ones(1), algorithm="ring") == world.size
    comm.free()


def options_are_checked() -> None:
    for options in ({"timeout": 0}, {"timeout": -1}):
        with raises(ConfigError, "timeout"):
            mpi.Communicator(world, **options)
    with raises(ConfigError, "comm=", "mpi4py"):
        mpi.allreduce(np.ones(1), algorithm="ring", comm="world")
    os.environ["HVD_COMPRESS_TIMEOUT"] = "soon"
    try:
        with raises(ConfigError, "HVD_COMPRESS_TIMEOUT", "number"):
            mpi.Communicator(world)
    finally:
        del os.environ["HVD_COMPRESS_TIMEOUT"]


def one_communicator_for_each_of_mpis() -> None:
    assert mpi.Communicator.of(world) is mpi.Communicator.of(None)
    half = world.Split(world.rank % 2)
    ours = mpi.Communicator.of(half)
    assert ours is mpi.Communicator.of(half)
    assert ours.size == half.size
    assert mpi.allreduce(np.ones(1), algorithm="ring", comm=half) == half.size
    half.Free()


def names_are_unique_to_ours() -> None:
    """Messages of the user's on the same communicator are not ours."""
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    theirs = np.empty(5)
    request = world.Irecv(theirs, left, 0)
    assert mpi.allreduce(np.ones(1), algorithm="ring") == world.size
    world.Send(np.full(5, world.rank, float), right, 0)
    request.Wait()
    assert (theirs == left).all()


def what_all_have_dropped_is_freed() -> None:
    """Reducers, of which each rank drops some at times of its own."""
    kept: list[mpi.Reducer] = []
    counts = []
    for number in range(200):
        reducer = mpi.Reducer("none")
        counts.append(len(reducer.engine.comm._family._handles))
        if number % 100 == 0:
            total = reducer.reduce({"w": np.full(3, world.rank, np.float32)})["w"]
            assert (total == (world.size - 1) / 2).all()
            mpi.allreduce(np.ones(9), comm=reducer.engine.comm, nodes=2)
        kept.append(reducer)
        if number % (7 + world.rank) == 0:  # each at times of its own
            del kept[:-1]
        del reducer
    assert max(counts) < 150, max(counts)
    kept.clear()


@applies(least=2)
def a_dropped_one_is_in_use_until_all_have_dropped_it() -> None:
    first = mpi.Communicator(world)
    if world.rank == 0:
        handles = first.handles
        del first
        gc.collect()
    second = mpi.Communicator(world)
    if world.rank == 0:
        assert handles.mpi != mpi.MPI.COMM_NULL
    else:
        del first
        gc.collect()
    third = mpi.Communicator(world)
    if world.rank == 0:
        assert handles.mpi == mpi.MPI.COMM_NULL
    for comm in (second, third):
        comm.free()


@applies(least=3)
def notes_end_with_their_communicator() -> None:
    """A note that nobody has read there is not taken for a note of the next one that gets its
    number."""
    part = world.Split(world.rank == 0, world.rank)
    whole = mpi.Communicator(world)
    notes.leave([whole.handles], "waits elsewhere")
    world.Barrier()
    whole.free()
    kept = [mpi.Communicator(part) for _ in range(3)]
    world.Barrier()
    for each in kept:
        assert notes.read(each) == {}
        each.free()
    part.Free()
