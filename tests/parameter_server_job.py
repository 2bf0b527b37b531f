"""``mpirun -np N python parameter_server_job.py CASE FOLDER``: parameter servers in real jobs.

Each rank writes what it has seen to ``FOLDER/RANK``, as JSON; ``parameter_server/test_mpi.py``
reads it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvd_compress import mpi
from hvd_compress.errors import CollectiveTimeout, PayloadError
from hvd_compress.systems.servers import SGD, Rules
from tests.systems.servers import STEPS, TIMEOUT
from tests.systems.servers.simulation import Simulation

WORLD = mpi.MPI.COMM_WORLD
FOLDER = [Path(sys.argv[2])]


def start() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "w": random.standard_normal((70, 50)).astype(np.float32),
        "b": random.standard_normal(50).astype(np.float32),
    }


def gradient(worker: int, x: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([worker, step])
    return {k: v + random.standard_normal(v.shape).astype(np.float32) for k, v in x.items()}


def write(**found: Any) -> None:
    """Under this name only when it is whole."""
    file = FOLDER[0] / str(WORLD.rank)
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(found))
    draft.rename(file)


def found_by(server: mpi.ParameterServer, steps: int = 0) -> None:
    """Write what a rank has in the end."""
    write(
        steps=steps,
        parameters=np.concatenate([x.ravel() for x in server.parameters.values()]).tolist(),
        stats=json.loads(server.stats().to_bytes().tobytes()),
        bytes_sent=server.bytes_sent,
    )


def train(
    meanwhile: Callable[[mpi.ParameterServer, int], None] = lambda worker, step: None,
    steps: int = STEPS,
    fewer: dict[int, int] = {},  # noqa: B006  # of some workers
    **options: Any,
) -> None:
    worker = mpi.ParameterServer(start(), SGD(lr=0.1), **options)
    done = 0
    with worker:
        for step in worker.batches(range(fewer.get(worker.rank, steps))):
            meanwhile(worker, step)
            worker.step(gradient(worker.rank, worker.parameters, step))
            done += 1
    found_by(worker, done)


def synchronous(**more: Any) -> None:
    """The bits of the simulation, whatever the order of messages."""
    train(**more)
    workers = WORLD.size - 1
    sim = Simulation(start(), gradient, workers, Rules(**more), SGD(lr=0.1))
    for _ in range(STEPS):
        sim.run(range(workers))
    found = json.loads((FOLDER[0] / str(WORLD.rank)).read_text())
    expected = np.concatenate([x.ravel() for x in sim.parameters.values()])
    np.testing.assert_array_equal(np.array(found["parameters"], np.float32), expected)


def slow(worker: mpi.ParameterServer, step: int) -> None:
    time.sleep(0.05 if worker.rank == 0 else 0.005)


def leaves(worker: mpi.ParameterServer, step: int) -> None:
    if (worker.rank, step) == (1, 2):
        raise RuntimeError("an error of this worker alone")


def stops(worker: mpi.ParameterServer, step: int) -> None:
    if (worker.rank, step) == (1, 2):
        os.kill(os.getpid(), signal.SIGSTOP)


def dies(worker: mpi.ParameterServer, step: int) -> None:
    if (worker.rank, step) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.15)  # the others go on for longer than the time-out


def pauses(worker: mpi.ParameterServer, step: int) -> None:
    """One is silent too long and comes back while the others still train."""
    if worker.rank == 1 and step == 2:
        time.sleep(2 * TIMEOUT)
    elif worker.rank != 1:
        time.sleep(0.25)


def pauses_with_all(worker: mpi.ParameterServer, step: int) -> None:
    """All validate, one longer than the other."""
    if step == 2:
        time.sleep(1.5 * TIMEOUT + 0.2 * worker.rank)


def forgets() -> None:
    """Workers take steps outside of the statement, and end."""
    worker = mpi.ParameterServer(start(), SGD(lr=0.1), worker_timeout=TIMEOUT)
    if worker.is_server:
        with worker:
            found_by(worker)
    else:
        worker.step(gradient(worker.rank, worker.parameters, 0))


def damaged() -> None:
    """A bit of a gradient changes on its way."""
    worker = mpi.ParameterServer(start(), SGD(lr=0.1))
    if worker.rank == 1:
        push = worker._link.push

        def wrong(*arguments: Any) -> np.ndarray:
            frame = push(*arguments)
            frame[5000] ^= 1
            return frame

        worker._link.push = wrong
    try:
        with worker:
            for step in worker.batches(range(STEPS)):
                worker.step(gradient(worker.rank, worker.parameters, step))
    except PayloadError as error:
        write(error=str(error))
        raise


def a_server_hangs() -> None:
    worker = mpi.ParameterServer(
        start(), comm=mpi.Communicator(timeout=TIMEOUT), worker_timeout=TIMEOUT / 2
    )
    if worker.is_server:
        time.sleep(4 * TIMEOUT)
        sys.exit(1)
    try:
        with worker:
            worker.step(gradient(worker.rank, worker.parameters, 0))
    except CollectiveTimeout as error:
        write(error=str(error))
        raise


def asynchronous(make: Callable[..., Any], **options: Any) -> None:
    """Worker 0 is slow and takes few steps, until the others are done."""
    worker, done = make(start(), **options), 0
    with worker:
        for _ in worker.batches(range(4 if worker.rank == 0 else 40)):
            time.sleep(0.06 if worker.rank == 0 else 0.005)
            x = worker.parameters
            loss = sum(float(np.square(v).sum()) for v in x.values())
            worker.step({k: v - np.float32(0.05) * v for k, v in x.items()}, loss)
            done += 1
    found_by(worker, done)


def all_well() -> None:
    """One after the other in one job, each with a folder of its own."""
    outer = FOLDER[0]
    for name in WELL:
        FOLDER[0] = outer / name
        FOLDER[0].mkdir(exist_ok=True)
        CASES[name]()


#: cases in which nobody fails
WELL = (
    *("sync", "sync-topk", "backup", "async"),
    *("ends-early", "pauses", "all-pause", "short-time-out"),
    *("leaders", "leaders-of-groups"),
)
CASES: dict[str, Callable[[], None]] = {
    "sync": synchronous,
    "sync-topk": lambda: synchronous(compression="topk:density=0.05"),
    "backup": lambda: train(slow, backup=1),
    "async": lambda: train(slow, mode="async", compression="topk:density=0.1"),
    "ends-early": lambda: train(fewer={1: 3}),
    "leaves": lambda: train(leaves),
    "stops": lambda: train(stops, worker_timeout=TIMEOUT),
    "dies": lambda: train(dies, steps=20, worker_timeout=TIMEOUT, mode="async"),
    "pauses": lambda: train(pauses, steps=20, worker_timeout=TIMEOUT, mode="async"),
    "all-pause": lambda: train(pauses_with_all, worker_timeout=TIMEOUT),
    "short-time-out": lambda: train(comm=mpi.Communicator(timeout=20)),
    "leaders": lambda: asynchronous(mpi.AsynchronousLeaderSGD, local_every=4),
    "leaders-of-groups": lambda: asynchronous(
        mpi.AsynchronousLeaderSGD, local_every=4, global_every=8, groups=2
    ),
    "well": all_well,
    "damaged": damaged,
    "forgets": forgets,
    "server-hangs": a_server_hangs,
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
