"""``python -m benchmarks.reliability.worker JOB FOLDER METHOD``: a rank of a job that is disturbed.

It trains a small model until there is a file ``FOLDER/stop``.  Each rank leaves ``RANK.pid`` when
it starts, ``RANK.steps`` after each step, and ``RANK.end`` when it ends by itself: a JSON of the
error's name and message, both empty without one, and of the time.  In the end the ranks compare
the bits of what they have trained.  On SIGUSR1 it writes to ``RANK.trace`` where it is.
"""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

KIND, FOLDER, METHOD = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
#: seconds of each job's own time-outs, where there is one
TIMEOUT = float(os.environ.get("RELIABILITY_TIMEOUT", "8"))


def write(name: str, text: str) -> None:
    """Under this name only when it is whole."""
    draft = FOLDER / f"{name}.draft"
    draft.write_text(text)
    draft.rename(FOLDER / name)


def has_to_stop() -> bool:
    return (FOLDER / "stop").exists()


def counted(rank: int, steps: Iterator[int]) -> None:
    """Take steps, each of which says that it is done."""
    write(f"{rank}.pid", str(os.getpid()))
    for step in steps:
        write(f"{rank}.steps", str(step + 1))


def digest(arrays: Iterable[np.ndarray]) -> np.ndarray:
    found = hashlib.sha256(b"".join(x.tobytes() for x in arrays)).digest()
    return np.frombuffer(found, np.uint8).copy()


def compare(digests: np.ndarray) -> None:
    rows = digests.reshape(-1, 32)
    if (rows != rows[0]).any():
        raise AssertionError("the ranks hold different bits")


def over_mpi() -> tuple[int, Iterator[int]]:
    from hvd_compress import mpi

    comm = mpi.Communicator(timeout=TIMEOUT)

    def steps() -> Iterator[int]:
        reducer, draw = mpi.Reducer(METHOD, comm=comm), np.random.default_rng(comm.rank)
        shapes = {f"w{i}": (250, 100) for i in range(4)} | {"b": (300,)}
        weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        for step in itertools.count():
            own = {name: draw.standard_normal(x.shape, np.float32) for name, x in weights.items()}
            for name, direction in reducer.reduce(own).items():
                weights[name] -= direction
            yield step
            if mpi.allreduce(np.array([float(has_to_stop())]), comm=comm)[0]:
                mine = digest(weights.values())
                compare(np.concatenate(mpi.MPI.COMM_WORLD.allgather(mine)))
                return

    return comm.rank, steps()


def by_server() -> tuple[int, Iterator[int]]:
    from hvd_compress import mpi
    from hvd_compress.systems.servers import SGD

    worker = mpi.ParameterServer(
        {"w": np.zeros((70, 50), np.float32), "b": np.zeros(50, np.float32)},
        SGD(lr=0.1),
        mode=os.environ.get("RELIABILITY_MODE", "sync"),
        worker_timeout=TIMEOUT / 2,
        comm=mpi.Communicator(timeout=TIMEOUT),
        compression=METHOD,
    )

    def steps() -> Iterator[int]:
        if worker.is_server:
            yield 0  # since it serves where the block begins
        with worker:
            for step in worker.batches(itertools.count()):
                if has_to_stop():
                    break
                time.sleep(0.005)
                worker.step({name: x + 1 for name, x in worker.parameters.items()})
                yield step

    return mpi.MPI.COMM_WORLD.rank, steps()


def over_horovod() -> tuple[int, Iterator[int]]:
    import torch

    import hvd_compress.torch as hvd
    from tests.scenarios.common import distribute, loss_of, make_model, sgd

    torch.set_num_threads(1)
    hvd.init()

    def steps() -> Iterator[int]:
        model = make_model()
        optimizer = distribute(sgd(model), model, METHOD)
        for step in itertools.count():
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
            yield step
            flag = torch.tensor([float(has_to_stop())])
            if hvd.allreduce(flag, name="stop", op=hvd.Max)[0]:
                mine = torch.from_numpy(digest(p.detach().numpy() for p in model.parameters()))
                compare(hvd.allgather(mine, name="bits").numpy())
                return

    return hvd.rank(), steps()


def by_ddp() -> tuple[int, Iterator[int]]:
    import torch
    import torch.distributed as dist

    from hvd_compress.torch.ddp.hook import DDPState, ddp_hook

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))

    def steps() -> Iterator[int]:
        torch.manual_seed(0)
        inner = torch.nn.Sequential(
            torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5)
        )
        model = torch.nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.005)
        model.register_comm_hook(DDPState(METHOD, model), ddp_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in itertools.count():
            optimizer.zero_grad()
            model(torch.randn(8, 40)).square().sum().backward()
            optimizer.step()
            yield step
            flag = torch.tensor([float(has_to_stop())])
            dist.all_reduce(flag)
            if flag[0]:
                mine = torch.from_numpy(digest(p.detach().numpy() for p in inner.parameters()))
                everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, mine)
                compare(torch.cat(everyones).numpy())
                dist.destroy_process_group()
                return

    return dist.get_rank(), steps()


_JOBS: dict[str, Callable[[], tuple[int, Iterator[int]]]] = {
    "mpi": over_mpi,
    "server": by_server,
    "horovod": over_horovod,
    "ddp": by_ddp,
}


def main() -> None:
    rank, steps = _JOBS[KIND]()
    faulthandler.register(signal.SIGUSR1, (FOLDER / f"{rank}.trace").open("w"))
    try:
        counted(rank, steps)
    except Exception as error:
        end = [type(error).__name__, str(error), time.time()]
        write(f"{rank}.end", json.dumps(end))
        raise
    write(f"{rank}.end", json.dumps(["", "", time.time()]))


if __name__ == "__main__":
    main()
