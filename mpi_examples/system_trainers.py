"""How one rank takes its steps in the systems of systems.py.

Only ranks import this: it imports MPI.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

import hvd_compress.torch.mpi as hvd
from mpi_examples import budget
from mpi_examples.local_methods import over_a_graph, wrapped
from mpi_examples.systems import BITS, DENSITY, EVERY, System


class Trainer:
    """A rank alone."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def running(self) -> Any:
        return contextlib.nullcontext()

    def each(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        return enumerate(batches)

    def share(self, batch: np.ndarray) -> np.ndarray:
        return batch[hvd.rank() :: hvd.size()]

    def set_rate(self, lr: float) -> None:
        self.optimizer.param_groups[0]["lr"] = lr

    def step(self, loss: torch.Tensor, logits: torch.Tensor, x: torch.Tensor) -> None:
        """Take a step, from the loss on this rank's images x."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def sent(self) -> int:
        """Bytes so far."""
        return 0

    def finish(self) -> None:
        """Give the model the parameters that are to be tested."""


class Distributed(Trainer):
    """Gradients or parameters travel."""

    def step(self, loss: torch.Tensor, logits: torch.Tensor, x: torch.Tensor) -> None:
        if hasattr(self.optimizer, "report"):
            self.optimizer.report(loss)  # Leader SGD chooses by it
        super().step(loss, logits, x)

    def sent(self) -> int:
        owner = getattr(self.optimizer, "training", None) or self.optimizer.compression
        return owner.stats().total.bytes_sent

    def finish(self) -> None:
        if hasattr(self.optimizer, "synchronize_parameters"):
            self.optimizer.synchronize_parameters()


class Codistilled(Trainer):
    """Models teach each other."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, steps: int, **options: Any
    ) -> None:
        super().__init__(optimizer)
        self.teachers = hvd.Codistillation(model, burn_in=steps // 8, **options)
        self.same_images = options.get("exchange") == "predictions"

    def share(self, batch: np.ndarray) -> np.ndarray:
        return batch[:: hvd.size()] if self.same_images else super().share(batch)

    def step(self, loss: torch.Tensor, logits: torch.Tensor, x: torch.Tensor) -> None:
        super().step(self.teachers.loss(loss, logits, x), logits, x)

    def sent(self) -> int:
        return self.teachers.stats().total.bytes_sent


class Served(Trainer):
    """Rank 0 is the parameter server, the others are workers."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, **options: Any
    ) -> None:
        super().__init__(optimizer)
        self.worker = hvd.parameter_server(model, optimizer, **options)

    def running(self) -> Any:
        return self.worker

    def each(self, batches: Iterable[np.ndarray]) -> Iterator[tuple[int, np.ndarray]]:
        return self.worker.batches(enumerate(batches))

    def share(self, batch: np.ndarray) -> np.ndarray:
        return batch[self.worker.rank :: self.worker.size]

    def step(self, loss: torch.Tensor, logits: torch.Tensor, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.worker.step()

    def sent(self) -> int:
        """On the server, what it sent in the whole run."""
        if self.worker.is_server:
            return self.worker.stats().bytes_down
        return self.worker.bytes_sent


def trainer_of(system: System, model: torch.nn.Module, steps: int) -> Trainer:
    """The trainer of a system, on this rank, for a run of so many steps."""
    own, what = _optimizer(system, model, max(steps // 4, 1)), system.what
    if system.family == "alone":
        return Trainer(own)
    if system.family == "codistillation":
        return Codistilled(own, model, steps, **what)
    if system.family == "server":
        return Served(own, model, **what)
    if system.family == "local":
        return Distributed(wrapped(what, own, steps, EVERY, DENSITY))
    if system.family == "graph":
        return Distributed(over_a_graph(what, own, "cycle", BITS))
    compression = "none"
    if system.family == "adam":
        compression = own.compressor()
    elif system.family == "compression":
        compression = what(steps) if callable(what) else what
    return Distributed(hvd.DistributedOptimizer(own, compression=compression))


def _optimizer(system: System, model: torch.nn.Module, freeze: int) -> torch.optim.Optimizer:
    """Of this rank alone; 1-bit and 0/1 Adam freeze their variance after so many steps."""
    more: dict[str, dict[str, Any]] = {
        "LARS": {"momentum": 0.9, "trust_coefficient": 0.01},
        "LAMB": {},
        "OneBitAdam": {"freeze_step": freeze},
        "OneBitLAMB": {"freeze_step": freeze, "eps": 1e-3},
        # With its default local_step_scaler it would synchronize in each of so few steps.
        "ZeroOneAdam": {"var_freeze_step": freeze, "local_step_scaler": freeze},
    }
    if system.family in ("adam", "large") and system.what in more:
        options = budget.PARTNERS.get(system.what, {}) | more[system.what] | {"lr": system.lr}
        return getattr(hvd, system.what)(model.parameters(), **options)
    return torch.optim.SGD(model.parameters(), system.lr, momentum=0.9, nesterov=True)
