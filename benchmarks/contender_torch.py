"""What ``sync_resnet50.py`` times under PyTorch."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from model_shapes import Shapes, resnet50

import hvd_compress.torch as hvd
from hvd_compress import kernels


class Contender:
    """One optimizer over parameters of its own.  A sample is the time from the start of backward,
    which is one multiplication a tensor, to the last averaged gradient."""

    def __init__(self, name: str, compression: object, shapes: Shapes | None = None) -> None:
        self.name, self.seconds, self.python = name, [], []
        self.parameters = {
            key: torch.nn.Parameter(torch.zeros(shape))
            for key, shape in (shapes or resnet50()).items()
        }
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=0.01, momentum=0.9),
            named_parameters=[(f"{name}.{key}", p) for key, p in self.parameters.items()],
            compression=compression,
        )
        self.compression: Any = getattr(self.optimizer, "compression", None)

    def sample(self, gradients: dict[str, torch.Tensor]) -> float:
        self.optimizer.zero_grad()
        loss = sum((p * gradients[key]).sum() for key, p in self.parameters.items())
        hvd.barrier()
        start = time.perf_counter()
        loss.backward()
        self.optimizer.synchronize()
        seconds = torch.tensor(time.perf_counter() - start)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return hvd.allreduce(seconds, op=hvd.Max, name="seconds").item()


class Stream:
    """The floor of a step without a network: every rank reads its gradients, velocities and
    residuals, and writes the latter two."""

    def __init__(self, name: str) -> None:
        self.name, self.seconds, self.python, self.compression = name, [], [], None
        self._state = {k: (torch.zeros(s), torch.zeros(s)) for k, s in resnet50().items()}

    def sample(self, gradients: dict[str, torch.Tensor]) -> float:
        rows = [(gradients[key], *state) for key, state in self._state.items()]
        hvd.barrier()
        start = time.perf_counter()
        kernels.stream([[x.view(-1) for x in row] for row in rows])
        seconds = torch.tensor(time.perf_counter() - start)
        return hvd.allreduce(seconds, op=hvd.Max, name="seconds").item()


class PlainTopK:
    """Top-k with error feedback as it is commonly written: for each tensor torch.topk, and an
    allgather each of values and of indices."""

    def __init__(self, name: str, density: float) -> None:
        self.name, self.seconds, self.python, self.compression = name, [], [], None
        self._residuals = {k: torch.zeros(math.prod(s)) for k, s in resnet50().items()}
        self._counts = {k: math.ceil(density * x.numel()) for k, x in self._residuals.items()}
        self.bytes_sent = 8.0 * sum(self._counts.values())

    def sample(self, gradients: dict[str, torch.Tensor]) -> float:
        hvd.barrier()
        start = time.perf_counter()
        handles = {}
        for key, gradient in gradients.items():
            x = self._residuals[key].add_(gradient.view(-1))
            _, indices = torch.topk(x.abs(), self._counts[key], sorted=False)
            values = x[indices]
            x[indices] = 0
            handles[key] = [
                hvd.allgather_async(part, name=f"{self.name}.{key}.{i}")
                for i, part in enumerate((values, indices.int()))
            ]
        for key, parts in handles.items():
            values, indices = map(hvd.synchronize, parts)
            mean = torch.zeros(gradients[key].numel())
            mean.index_add_(0, indices.long(), values)
            mean /= hvd.size()
        seconds = torch.tensor(time.perf_counter() - start)
        return hvd.allreduce(seconds, op=hvd.Max, name="seconds").item()


def line_rate() -> float:
    """Return the bytes a second that each rank receives when all send to their neighbours."""
    n, size = 2**21, hvd.size()
    splits = torch.zeros(size, dtype=torch.int32)
    splits[(hvd.rank() + 1) % size] = n
    best = math.inf
    for i in range(4):
        hvd.barrier()
        start = time.perf_counter()
        hvd.alltoall(torch.zeros(n), splits, name=f"line.{i}")
        seconds = torch.tensor(time.perf_counter() - start)
        best = min(best, hvd.allreduce(seconds, op=hvd.Max, name="seconds").item())
    return 4 * n / best


def seed(number: int) -> None:
    torch.manual_seed(number)


def random_gradients(shapes: Shapes | None = None) -> dict[str, torch.Tensor]:
    return {key: torch.randn(shape) for key, shape in (shapes or resnet50()).items()}
