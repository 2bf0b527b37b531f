"""``python -m benchmarks.reliability.worker JOB FOLDER METHOD``: a rank of a job that is disturbed.

It trains a small model until there is a file ``FOLDER/stop``.  Each rank leaves ``RANK.pid`` when
it starts, ``RANK.steps`` after each step, and ``RANK.end`` when it ends by itself: the error, or an
empty line.  In the end the ranks compare the bits of what they have trained.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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


class Ranks(NamedTuple):
    """How a rank trains, and meets the others outside of training."""

    rank: int
    step: Callable[[int], object]
    weights: Callable[[], Iterable[np.ndarray]]
    #: returns the arrays of all ranks
    gather: Callable[[np.ndarray], Iterable[np.ndarray]]

    def steps(self) -> Iterator[int]:
        """Train until any rank has to stop, and compare the bits."""
        for step in itertools.count():
            self.step(step)
            yield step
            if np.any([*self.gather(np.array([has_to_stop()], np.uint8))]):
                break
        digest = hashlib.sha256(b"".join(x.tobytes() for x in self.weights())).digest()
        if len({x.tobytes() for x in self.gather(np.frombuffer(digest, np.uint8).copy())}) > 1:
            raise AssertionError("the ranks hold different bits")


def over_mpi() -> tuple[int, Iterator[int]]:
    from hvd_compress import mpi

    comm = mpi.Communicator(timeout=TIMEOUT)
    reducer, draw = mpi.Reducer(METHOD, comm=comm), np.random.default_rng(comm.rank)
    shapes = {f"w{i}": (250, 100) for i in range(4)} | {"b": (300,)}
    weights = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}

    def step(_: int) -> None:
        own = {name: draw.standard_normal(x.shape, np.float32) for name, x in weights.items()}
        for name, direction in reducer.reduce(own).items():
            weights[name] -= direction

    def gather(x: np.ndarray) -> Iterable[np.ndarray]:
        mine = np.zeros((comm.size, x.size), np.float32)  # a sum, which has a time-out
        mine[comm.rank] = x
        return mpi.allreduce(mine, comm=comm)

    return comm.rank, Ranks(comm.rank, step, weights.values, gather).steps()


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
    from tests.scenarios.common import distribute, make_model, sgd, train

    torch.set_num_threads(1)
    hvd.init()
    model = make_model()
    optimizer = distribute(sgd(model), model, METHOD)
    ranks = Ranks(
        hvd.rank(),
        lambda step: train(model, optimizer, [step]),
        lambda: [p.detach().numpy() for p in model.parameters()],
        lambda x: hvd.allgather(torch.from_numpy(x)[None], name="all").numpy(),
    )
    return ranks.rank, ranks.steps()


def by_ddp() -> tuple[int, Iterator[int]]:
    import torch
    import torch.distributed as dist

    from hvd_compress.torch.ddp.hook import DDPState, ddp_hook

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    model = torch.nn.parallel.DistributedDataParallel(inner, bucket_cap_mb=0.005)
    model.register_comm_hook(DDPState(METHOD, model), ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().sum().backward()
        optimizer.step()

    def gather(x: np.ndarray) -> Iterable[np.ndarray]:
        everyones = [torch.empty(x.size, dtype=torch.uint8) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, torch.from_numpy(x))
        return [each.numpy() for each in everyones]

    def weights() -> Iterable[np.ndarray]:
        return [p.detach().numpy() for p in inner.parameters()]

    return dist.get_rank(), Ranks(dist.get_rank(), step, weights, gather).steps()


JOBS = {"mpi": over_mpi, "server": by_server, "horovod": over_horovod, "ddp": by_ddp}


def main() -> None:
    rank, steps = JOBS[KIND]()
    write(f"{rank}.pid", str(os.getpid()))
    error = ""
    try:
        for step in steps:
            write(f"{rank}.steps", str(step + 1))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
        raise
    finally:
        write(f"{rank}.end", f"{error}\n")


if __name__ == "__main__":
    main()
