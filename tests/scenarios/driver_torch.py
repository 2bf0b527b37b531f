"""PyTorch behind the interface of driver.py."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np
import torch

from hvd_compress.errors import MismatchError
from tests.devices import DEVICE
from tests.scenarios import oracle

torch.set_num_threads(1)
over = os.environ.get("SCENARIOS_OVER", "horovod")
hvd: Any = importlib.import_module(
    "hvd_compress.torch.mpi" if over == "mpi" else "hvd_compress.torch"
)


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(oracle.WORDS, oracle.DIMENSIONS, sparse=True)
        self.linear = torch.nn.Linear(oracle.DIMENSIONS, oracle.WIDTHS[-1], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(x).mean(1))


def _model(kind: str, dtype: str) -> torch.nn.Module:
    if kind == "words":
        return Words().to(DEVICE, getattr(torch, dtype))
    layers: list[torch.nn.Module] = []
    for inputs, outputs in zip(oracle.WIDTHS, oracle.WIDTHS[1:], strict=False):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers[:-1]).to(DEVICE, getattr(torch, dtype))


class Run:
    def __init__(self, method: Any, setup: oracle.Setup, options: dict[str, Any]) -> None:
        self.kind, self.dtype = setup.kind, setup.dtype
        self.model = _model(setup.kind, setup.dtype)
        self.names = list(oracle.initial_weights(setup.kind))
        self.set_weights(oracle.initial_weights(setup.kind, setup.dtype))
        if options.get("groups") == "two":
            options["groups"] = [list(self.model.parameters())[:2]]
        momentum = {"momentum": setup.momentum, "nesterov": setup.nesterov}
        inner = (
            torch.optim.SGD(self.model.parameters(), setup.lr, **momentum)
            if setup.optimizer is None
            else setup.optimizer(self.model.parameters(), setup.lr)
        )
        self.optimizer = hvd.DistributedOptimizer(
            inner,
            named_parameters=self.model.named_parameters(),
            compression=method,
            **options,
        )
        self.compression = getattr(self.optimizer, "compression", None)

    def step(self, number: int, *, passes: int = 1, spoilt: bool = False) -> None:
        self.optimizer.zero_grad()
        for part in range(passes):
            x, y = oracle.batch(self.kind, hvd.rank(), number * passes + part, self.dtype)
            if spoilt:
                x = np.full_like(x, np.nan)
            x, y = (torch.tensor(own, device=DEVICE) for own in (x, y))
            torch.nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def weights(self) -> dict[str, np.ndarray]:
        return {
            name: turned(name, p.detach().cpu().numpy()).copy()
            for name, p in zip(self.names, self.model.parameters(), strict=True)
        }

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, p in zip(self.names, self.model.parameters(), strict=True):
                p.copy_(torch.tensor(turned(name, weights[name])))

    def states(self) -> dict[str, np.ndarray]:
        return {
            f"{name}.{key}": x.cpu().numpy().copy()
            for name, p in zip(self.names, self.model.parameters(), strict=True)
            for key, x in self.compression.store.state_of(p).items()
        }


mismatch = MismatchError


def set_step(run: Run, step: int) -> None:
    run.compression.reducer.step = step


def turned(name: str, weight: np.ndarray) -> np.ndarray:
    """torch.nn.Linear has outputs first."""
    return weight.T if name.startswith("kernel") else weight


adam = torch.optim.Adam
onebit_adam, zero_one_adam = hvd.OneBitAdam, hvd.ZeroOneAdam
lamb, onebit_lamb = hvd.LAMB, hvd.OneBitLAMB


def allgather(x: np.ndarray, **options: Any) -> np.ndarray:
    return hvd.allgather(torch.tensor(x), name="allgather", **options).numpy()
