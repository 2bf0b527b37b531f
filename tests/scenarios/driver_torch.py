"""PyTorch behind the interface of driver.py."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import numpy as np
import torch

from hvd_compress.errors import MismatchError
from hvd_compress.torch.codistillation import LOSSES as LOSSES
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


class _Trained:
    """A model of the oracle's network."""

    def __init__(self, kind: str, dtype: str) -> None:
        self.kind, self.dtype = kind, dtype
        self.model = _model(kind, dtype)
        self.names = list(oracle.initial_weights(kind))

    def weights(self) -> dict[str, np.ndarray]:
        return {
            name: turned(name, p.detach().cpu().numpy()).copy()
            for name, p in zip(self.names, self.model.parameters(), strict=True)
        }

    def set_weights(self, weights: dict[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, p in zip(self.names, self.model.parameters(), strict=True):
                p.copy_(torch.tensor(turned(name, weights[name])))


class Student(_Trained):
    def __init__(self, weights: dict[str, np.ndarray], *args: Any, **options: Any) -> None:
        super().__init__("mlp", "float64")
        self.set_weights(weights)
        self.codistillation = hvd.Codistillation(self.model, *args, **options)
        self.sgd = torch.optim.SGD(self.model.parameters(), oracle.LR)

    def _losses(self, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = oracle.batch("mlp", rank, number, "float64")
        x, y = (torch.tensor(each, device=DEVICE) for each in own)
        z = self.model(x)
        task = torch.nn.functional.cross_entropy(z, y)
        return task, self.codistillation.loss(task, z, x)

    def step(self, rank: int, number: int) -> None:
        self.sgd.zero_grad()
        self._losses(rank, number)[1].backward()
        self.sgd.step()

    def losses(self, rank: int, number: int) -> tuple[float, float]:
        task, loss = self._losses(rank, number)
        return task.item(), loss.item()


class Run(_Trained):
    def __init__(self, method: Any, setup: oracle.Setup, options: dict[str, Any]) -> None:
        super().__init__(setup.kind, setup.dtype)
        self.set_weights(oracle.initial_weights(setup.kind, setup.dtype))
        if options.get("groups") == "two":
            options["groups"] = [list(self.model.parameters())[:2]]
        momentum = {"momentum": setup.momentum, "nesterov": setup.nesterov}
        inner = (
            torch.optim.SGD(self.model.parameters(), setup.lr, **momentum)
            if setup.optimizer is None
            else setup.optimizer(self.model.parameters(), setup.lr)
        )
        if "method" not in options:
            options["compression"] = method
        named = dict(self.model.named_parameters())
        self.framework_names = list(named)
        self.optimizer = hvd.DistributedOptimizer(inner, named_parameters=named.items(), **options)
        self.compression = getattr(self.optimizer, "compression", None)
        self.sam = None if setup.sam is None else hvd.SAM(self.model, **setup.sam)

    def step(self, number: int, *, passes: int = 1, spoilt: bool = False) -> None:
        self.optimizer.zero_grad()
        for part in range(passes):
            x, y = oracle.batch(self.kind, hvd.rank(), number * passes + part, self.dtype)
            if spoilt:
                x = np.full_like(x, np.nan)
            x, y = (torch.tensor(own, device=DEVICE) for own in (x, y))

            def loss(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                return torch.nn.functional.cross_entropy(self.model(x), y)

            if self.sam is not None:
                self.sam.backward(loss)
                continue
            found = loss()
            found.backward()
            if hasattr(self.optimizer, "training"):
                self.optimizer.report(found)
        self.optimizer.step()

    def states(self) -> dict[str, np.ndarray]:
        return {
            f"{name}.{key}": x.cpu().numpy().copy()
            for name, p in zip(self.names, self.model.parameters(), strict=True)
            for key, x in self.compression.store.state_of(p).items()
        }


mismatch, tensor = MismatchError, torch.from_numpy


def set_step(run: Run, step: int) -> None:
    run.compression.reducer.step = step


def set_rate(run: Run, rate: float) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = rate


def turned(name: str, weight: np.ndarray) -> np.ndarray:
    """torch.nn.Linear has outputs first."""
    return weight.T if name.startswith("kernel") else weight


adam = torch.optim.Adam
onebit_adam, zero_one_adam = hvd.OneBitAdam, hvd.ZeroOneAdam
lars, lamb, onebit_lamb = hvd.LARS, hvd.LAMB, hvd.OneBitLAMB


def allgather(x: np.ndarray, **options: Any) -> np.ndarray:
    return hvd.allgather(torch.tensor(x), name="allgather", **options).numpy()


def backward(loss: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Parameter `average`")  # Horovod's own gradients pass it
        loss.backward()


def gradients_through(function: Any, x: Any, weight: Any) -> list[np.ndarray]:
    x = torch.tensor(x, device=DEVICE, requires_grad=True)
    backward((torch.as_tensor(weight, device=DEVICE) * function(x)).sum())
    return [x.grad.cpu().numpy()]


def second_gradient(function: Any, x: Any) -> list[np.ndarray]:
    x = torch.tensor(x, device=DEVICE, requires_grad=True)
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return [found.detach().cpu().numpy() for found in (first, second)]
