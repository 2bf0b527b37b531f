"""Every system on one task: what each sends in a step, and the loss it reaches.

    python -m mpi_examples.all_systems --systems dense dgc powersgd diloco --seeds 1
    python -m mpi_examples.all_systems
    mpirun -np 4 python -m mpi_examples.all_systems --steps 320

SYSTEMS has each with its options.  Four ranks train the network of models.py on scikit-learn's
digits.  They begin with the same weights, but for models that teach each other or are alone.  In
each step there are the same 64 images, of which every rank, or every worker of a parameter server,
takes its share.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from hvd_compress import DGC, warmup_to
from hvd_compress.blocks import (
    allgather,
    chain,
    error_feedback,
    natural_dithering,
    scaled_sign,
    top_k,
)
from hvd_compress.cli.options import parser_of, positive
from hvd_compress.launch import under_mpirun
from hvd_compress.systems.graphs import l1
from mpi_examples.data import digits
from mpi_examples.models import accuracy, cnn
from mpi_examples.study import Run, each_run, first, percent, rate, size, spread, table, times

RANKS, BATCH = 4, 64
#: local steps between exchanges, and the share of elements of those that send some
EVERY, DENSITY = 8, 0.01
#: steps of warm-ups, and until others have learnt enough to send less
WARMUP = 20


class System(NamedTuple):
    """One row of the table: its family, what travels, how :func:`trainer_of` makes it, the highest
    learning rate, and how many batches make a step of the optimizer."""

    family: str
    travels: str
    what: Any
    lr: float = 0.05
    batches: int = 1

    @property
    def differs(self) -> bool:
        """Whether ranks begin, and end, with models of their own."""
        return self.family in ("codistillation", "alone")


FOUR = "gradients of 4 batches"
#: by family; ``what`` is a compression, makes an optimizer from the module ``hvd``, the parameters
#: and the learning rate, makes a training method from ``hvd``, or is the options of the system
ROWS: dict[str, dict[str, tuple[Any, ...]]] = {
    "compression": {
        "dense": ("gradients, float32", "none"),
        "fp16": ("gradients, 16 bits", "fp16"),
        "dgc": (
            "largest 0.1 % after a warm-up, float32",
            DGC(density=warmup_to(0.001, steps=WARMUP)),
        ),
        "dgc_compact": (
            "largest 0.1 %, 4 bits",
            DGC.compact(density=warmup_to(0.001, steps=WARMUP)),
        ),
        "onebit": ("signs and means of columns", "onebit"),
        "powersgd": ("two factors of rank 2", "powersgd:rank=2"),
        "topk": ("largest 1 %, float32", f"topk:density={DENSITY}"),
        "topk_dithering": (
            "largest 1 %, dithered to powers of 2",
            chain(error_feedback(), via=allgather(top_k(DENSITY), natural_dithering())),
        ),
        "scaled_sign": (
            "signs, one magnitude a tensor",
            chain(error_feedback(), via=allgather(scaled_sign())),
        ),
        "ef21": ("largest 1 % of what is new in the gradient", f"ef21:density={DENSITY}"),
        "oktopk": ("largest 1 % of the sum", f"oktopk:density={DENSITY}"),
        "lgc": (
            "dense, then largest 1 %, then their code",
            f"lgc:density={DENSITY},learn=10,code=53",
        ),
    },
    "adam": {
        "onebit_adam": (
            "dense, then signs of the momentum",
            lambda hvd, own, lr: hvd.OneBitAdam(own, lr, eps=1e-3, freeze_step=WARMUP),
            1e-3,
        ),
        "onebit_lamb": (
            "the same",
            lambda hvd, own, lr: hvd.OneBitLAMB(own, lr, eps=1e-3, freeze_step=WARMUP),
            0.01,
        ),
        # With its default local_step_scaler it would synchronize in each of so few steps.
        "zero_one_adam": (
            "the same at ever fewer steps",
            lambda hvd, own, lr: hvd.ZeroOneAdam(
                own, lr, eps=1e-3, var_freeze_step=WARMUP, local_step_scaler=WARMUP
            ),
            1e-3,
        ),
    },
    "large": {
        "large_batch": (FOUR, lambda hvd, own, lr: nesterov(own, lr), 0.1, 4),
        "lars": (
            FOUR,
            lambda hvd, own, lr: hvd.LARS(own, lr, momentum=0.9, trust_coefficient=0.01),
            0.4,
            4,
        ),
        "lamb": (FOUR, lambda hvd, own, lr: hvd.LAMB(own, lr), 0.05, 4),
    },
    "local": {
        "local_sgd": (
            "parameters, every 8 steps",
            lambda hvd: hvd.LocalSGD(EVERY),
        ),
        "post_local_sgd": (
            "gradients, later as local_sgd",
            lambda hvd: hvd.LocalSGD(EVERY, start=WARMUP),
        ),
        "diloco": (
            "changes of parameters, every 8 steps",
            lambda hvd: hvd.DiLoCo(sync_every=EVERY),
        ),
        "diloco+dgc": (
            "largest 1 % of these changes",
            lambda hvd: hvd.DiLoCo(sync_every=EVERY, compression=f"dgc:density={DENSITY}"),
        ),
        "streaming_diloco": (
            "as diloco, a half every 4 steps",
            lambda hvd: hvd.DiLoCo(sync_every=EVERY, fragments=2, delay=1),
        ),
        "sparse_loco": (
            "largest 1 % of the changes, 2 bits",
            lambda hvd: hvd.SparseLoCo(EVERY, DENSITY),
        ),
        "easgd": (
            "distances from the centre, every 8 steps",
            lambda hvd: hvd.EASGD(EVERY),
        ),
        "leader_sgd": (
            "the leader's parameters, every 8 steps",
            lambda hvd: hvd.LeaderSGD(
                local_every=EVERY, global_every=EVERY, local_pull=0.0, local_drift=0.0
            ),
        ),
        "leader_sgd_groups": (
            "the same in groups of 2, among all every 16",
            lambda hvd: hvd.LeaderSGD(local_every=EVERY, global_every=2 * EVERY, groups=2),
        ),
    },
    "graph": {
        "diffusion": ("parameters, to 2 neighbours", lambda hvd: hvd.Diffusion("cycle")),
        "exact_diffusion": (
            "corrected parameters, to 2 neighbours",
            lambda hvd: hvd.ExactDiffusion("cycle"),
        ),
        "gradient_tracking": (
            "parameters and tracked gradients, to 2 neighbours",
            lambda hvd: hvd.GradientTracking("cycle"),
        ),
        "lead": ("changes in 2 bits, to 2 neighbours", lambda hvd: hvd.LEAD("cycle")),
        "prox_lead": (
            "the same; weights shrink towards 0",
            lambda hvd: hvd.LEAD("cycle", prox=l1(1e-4)),
        ),
    },
    "codistillation": {
        "codistilled_models": ("whole models to all, every 8 steps", {"every": EVERY}),
        "codistilled_predictions": ("predictions of 16 images", {"exchange": "predictions"}),
        "codistilled_fp16": ("the same, 16 bits", {"exchange": "predictions", "values": "float16"}),
    },
    "server": {
        "server": ("gradients up, parameters down", {}),
        "server_backup": ("the same; the last one is dropped", {"backup": 1}),
        "server_async": ("the same, nobody waits", {"mode": "async"}, 0.02),
    },
    "alone": {
        "alone": ("nothing", None),
    },
}
SYSTEMS = {
    name: System(family, *row) for family, rows in ROWS.items() for name, row in rows.items()
}


def nesterov(parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)


def trainer_of(system: System, model: torch.nn.Module) -> Trainer:
    """The trainer of a system on this rank."""
    import hvd_compress.torch.mpi as hvd  # imports MPI, which starts with it: ranks only

    sgd, what = nesterov(model.parameters(), system.lr), system.what
    if system.family == "codistillation":
        teachers = hvd.Codistillation(model, burn_in=WARMUP // 2, **what)
        return Taught(teachers, sgd, hvd.rank(), hvd.size())
    if system.family == "server":
        return Served(hvd.parameter_server(model, sgd, **what), sgd)
    if system.family == "compression":
        sgd = hvd.DistributedOptimizer(sgd, compression=what)
    elif system.family in ("adam", "large"):
        own = what(hvd, model.parameters(), system.lr)
        compression = own.compressor() if system.family == "adam" else "none"
        sgd = hvd.DistributedOptimizer(own, compression=compression)
    elif system.family in ("local", "graph"):
        sgd = hvd.DistributedOptimizer(sgd, method=what(hvd))
    return Trainer(sgd, hvd.rank(), hvd.size())


class Trainer:
    """Takes the steps of one rank with an optimizer, of which alone ones exchange nothing."""

    def __init__(self, optimizer: Any, rank: int, size: int) -> None:
        self.optimizer, self.rank, self.size = optimizer, rank, size

    def running(self) -> Any:
        return contextlib.nullcontext()

    def each(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        return enumerate(batches)

    def share(self, batch: np.ndarray) -> np.ndarray:
        return batch[self.rank :: self.size]

    def set_rate(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    def step(self, loss: torch.Tensor, logits: torch.Tensor, x: torch.Tensor) -> None:
        """Take a step, from the loss on this rank's images x."""
        self.optimizer.zero_grad()
        loss.backward()
        if hasattr(self.optimizer, "report"):
            self.optimizer.report(loss)  # Leader SGD chooses by it
        self.optimizer.step()

    def sent(self) -> int:
        """Bytes so far."""
        for name in ("training", "compression"):
            if owner := getattr(self.optimizer, name, None):
                return owner.stats().total.bytes_sent
        return 0

    def finish(self) -> None:
        """Give the model the parameters that are to be tested."""
        if hasattr(self.optimizer, "synchronize_parameters"):
            self.optimizer.synchronize_parameters()


class Taught(Trainer):
    """A model whose teachers are the models of other ranks."""

    def __init__(self, teachers: Any, sgd: torch.optim.Optimizer, rank: int, size: int) -> None:
        super().__init__(sgd, rank, size)
        self.teachers = teachers

    def share(self, batch: np.ndarray) -> np.ndarray:
        same_images = self.teachers.method.exchange == "predictions"
        return batch[:: self.size] if same_images else super().share(batch)

    def step(self, loss: torch.Tensor, logits: torch.Tensor, x: torch.Tensor) -> None:
        super().step(self.teachers.loss(loss, logits, x), logits, x)

    def sent(self) -> int:
        return self.teachers.stats().total.bytes_sent


class Served(Trainer):
    """Rank 0 is the parameter server, the others are workers."""

    def __init__(self, worker: Any, sgd: torch.optim.Optimizer) -> None:
        super().__init__(sgd, worker.rank, worker.size)
        self.worker = worker

    def running(self) -> Any:
        return self.worker

    def each(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        return self.worker.batches(enumerate(batches))

    def step(self, loss: torch.Tensor, logits: torch.Tensor, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.worker.step()

    def sent(self) -> int:
        """On the server, what it sent in the whole run."""
        return self.worker.stats().bytes_down if self.worker.is_server else self.worker.bytes_sent


def batches(seed: int, images: int, size: int = BATCH) -> Iterator[np.ndarray]:
    """The images of all ranks in each step, without an end."""
    for epoch in itertools.count():
        order = np.random.default_rng([seed, epoch]).permutation(images)
        yield from order[: images // size * size].reshape(-1, size)


def train(name: str, seed: int, steps: int) -> Run:
    import hvd_compress.torch.mpi as hvd

    system = SYSTEMS[name]
    torch.manual_seed(1000 * seed + hvd.rank() if system.differs else seed)
    torch.set_num_threads(1)
    x, x_test, y, y_test = map(torch.from_numpy, digits(seed))
    model = cnn((1, 8, 8), 10)
    if not system.differs:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    trainer = trainer_of(system, model)
    before = None
    dealt = batches(seed, len(x), BATCH * system.batches)
    with trainer.running():
        for step, batch in trainer.each(itertools.islice(dealt, steps // system.batches)):
            if 4 * step * system.batches == 3 * steps:
                before = trainer.sent()
            mine = trainer.share(batch)
            trainer.set_rate(system.lr * rate(step * system.batches / steps))
            logits = model(x[mine])
            trainer.step(functional.cross_entropy(logits, y[mine]), logits, x[mine])
    sent = trainer.sent()  # before an average at the end, which any method pays once
    trainer.finish()
    if before is None:  # a server takes no steps, and sends evenly in those of others
        before = sent * 3 / 4
    right = accuracy(model, x_test, y_test)
    with torch.no_grad():
        loss = functional.cross_entropy(model(x_test), y_test).item()
    ranks = hvd.allgather_object((loss, right, sent / steps, 4 * (sent - before) / steps))
    losses, accuracies, sents, lates = zip(*ranks, strict=True)
    if not system.differs and len(set(losses)) > 1:
        raise SystemExit(f"{name}: the ranks' models differ")
    mean = statistics.mean(sents)
    dense = 4 * sum(p.numel() for p in model.parameters())
    return {
        "what travels": system.travels,
        "sent per step": mean,
        "by the busiest": max(sents),
        "ratio": dense / mean if mean else float("inf"),
        "in the last quarter": statistics.mean(lates),
        "test loss": statistics.mean(losses),
        "test accuracy": statistics.mean(accuracies),
    }


COLUMNS = {
    "what travels": first,
    "sent per step": size,
    "by the busiest": size,
    "ratio": times,
    "in the last quarter": size,
    "test loss": lambda losses: spread(losses, 3),
    "test accuracy": percent,
}


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=[*SYSTEMS], metavar="SYSTEM"
    )
    parser.add_argument("--steps", type=positive, default=80, help="of each run, of 64 images each")
    parser.add_argument("--seeds", type=positive, default=3, help="runs of each system")
    options = parser.parse_args()
    if options.steps % 16:
        parser.error("--steps must be a multiple of 16, in which all have exchanged")
    return options


def main() -> None:
    options = arguments()
    under_mpirun(RANKS)
    import hvd_compress.torch.mpi as hvd

    hvd.init()
    if hvd.size() != RANKS:
        raise SystemExit(f"start {RANKS} ranks: batches are dealt to so many")
    runs = each_run(
        options.systems,
        options.seeds,
        lambda name, seed: train(name, seed, options.steps),
        hvd.rank(),
    )
    if hvd.rank():
        return
    print(
        f"\n{RANKS} ranks, {options.steps} steps, {options.seeds} seeds\nsent per step: on average "
        "over ranks and all steps; ratio: to the gradient in every step\n"
    )
    print(table(runs, COLUMNS, "system"))


if __name__ == "__main__":
    main()
