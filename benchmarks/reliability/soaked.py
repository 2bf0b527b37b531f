"""``python -m benchmarks.reliability.soaked FOLDER SECONDS SYSTEM...``: a rank of the soak's jobs.

It trains the examples' network with each system for so many seconds, and leaves
``RANK.SYSTEM.json``: steps, losses, memory, and ``problems``, what it found wrong.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch.nn import functional

import hvd_compress.torch.mpi as hvd
from benchmarks.reliability.memory import resident
from benchmarks.reliability.soak import SOAKED
from mpi_examples.all_systems import BATCH, Trainer, batches, trainer_of
from mpi_examples.data import digits
from mpi_examples.models import cnn
from mpi_examples.study import rate

#: steps over which the learning rate falls; between two looks at bits, and at least; from which on
#: it is plain whether losses fall and memory grows
SCHEDULE, LOOK, MANY = 160, 16, 64
#: bytes by which the least in the last third of the steps may exceed that in the second: some
#: arrays of the model's size, 4 MB, which the C library keeps or gives back.  A leak raises the
#: least, too, and what a step takes and gives back does not
ALLOWED = 16 * 2**20
#: families whose ranks have the same bits after each step, not only in the end
ALWAYS_EQUAL = ("compression", "adam", "large", "horovod", "ddp")
world = MPI.COMM_WORLD


class Hooked(Trainer):
    """Under DistributedDataParallel, with a hook, over Gloo."""

    def __init__(self, sgd: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        import torch.distributed as dist

        from hvd_compress.torch.ddp.hook import DDPState, ddp_hook

        super().__init__(sgd, world.rank, world.size)
        dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
        self.model = torch.nn.parallel.DistributedDataParallel(model)
        self.model.register_comm_hook(DDPState("powersgd:rank=2", model), ddp_hook)

    def finish(self) -> None:
        torch.distributed.destroy_process_group()


def over_horovod(model: torch.nn.Module) -> Trainer:
    import hvd_compress.torch as horovod

    horovod.init()
    sgd, names = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model.named_parameters()
    made = horovod.DistributedOptimizer(sgd, names, compression="dgc:density=0.01")
    return Trainer(made, world.rank, world.size)


def digest(model: torch.nn.Module) -> str:
    parameters = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(parameters).hexdigest()


def train(name: str, seconds: float) -> dict[str, Any]:
    system = SOAKED[name]
    hvd.init()
    torch.manual_seed(world.rank if system.differs else 0)
    torch.set_num_threads(1)
    x, _, y, _ = map(torch.from_numpy, digits(0))
    model = cnn((1, 8, 8), 10)
    if system.family == "ddp":
        trainer: Any = Hooked(torch.optim.SGD(model.parameters(), 0.05, 0.9), model)
    elif system.family == "horovod":
        trainer = over_horovod(model)
    else:
        trainer = trainer_of(system, model)
    forward = getattr(trainer, "model", model)
    losses: list[float] = []
    memory: list[int] = []
    problems: list[str] = []

    def is_over(step: int) -> bool:
        """Look at the clock, and now and then at memory and bits."""
        memory.append(resident())
        if system.family == "server":  # whose workers are not at the same step
            return step >= LOOK and time.time() >= end
        is_due = system.family in ALWAYS_EQUAL and step % LOOK == 0
        if is_due and len(set(world.allgather(digest(model)))) > 1:
            problems.append(f"ranks differ after {step} steps")
        return bool(problems) or world.bcast(step >= LOOK and time.time() >= end)

    end = world.bcast(time.time()) + seconds
    with trainer.running():
        for step, batch in trainer.each(batches(0, len(x), BATCH * system.batches)):
            if is_over(step):
                break
            mine = trainer.share(batch)
            trainer.set_rate(system.lr * rate(min(1.0, step * system.batches / SCHEDULE)))
            logits = forward(x[mine])
            loss = functional.cross_entropy(logits, y[mine])
            losses.append(loss.item())
            trainer.step(loss, logits, x[mine])
    trainer.finish()
    if not system.differs and len(set(world.allgather(digest(model)))) > 1:
        problems.append("ranks differ in the end")
    return found(losses, memory, problems)


def found(losses: list[float], memory: list[int], problems: list[str]) -> dict[str, Any]:
    """Judge what a rank has seen; a server has seen nothing."""
    if not losses:
        return {"steps": 0, "problems": problems}
    few = max(1, min(len(losses) // 8, 20))
    first, last = statistics.mean(losses[:few]), statistics.mean(losses[-few:])
    third = max(1, len(memory) // 3)  # in which it goes up and down by some arrays
    middle = memory[-2 * third : -third] or memory
    grows = min(memory[-third:]) - min(middle)
    if not all(map(math.isfinite, losses)):
        problems.append("a loss is not finite")
    if not last < (0.7 if len(losses) >= MANY else 0.97) * first:
        problems.append(f"the loss does not fall: {first:.3f}, then {last:.3f}")
    if grows > ALLOWED and len(losses) >= MANY:
        problems.append(f"memory grows by {grows / 2**20:.1f} MiB")
    own = {"steps": len(losses), "first": first, "last": last, "grows": grows}
    return {**own, "problems": problems}


def main(folder: str, seconds: str, *names: str) -> None:
    for name in names:
        try:
            result = train(name, float(seconds))
        except BaseException as error:
            result = {"problems": [f"{type(error).__name__}: {error}"]}
            traceback.print_exc()
        Path(folder, f"{world.rank}.{name}.json").write_text(json.dumps(result))
        if "steps" not in result:
            world.Abort(1)  # the others would wait for this rank


if __name__ == "__main__":
    main(*sys.argv[1:])
