"""What ``sync_resnet50.py`` times under PyTorch."""

from __future__ import annotations

import time
from typing import Any

import torch
from model_shapes import resnet50

import hvd_compress.torch as hvd


class Contender:
    """One optimizer over parameters of its own.  A sample is the time from the start of backward,
    which is one multiplication a tensor, to the last averaged gradient."""

    def __init__(self, name: str, compression: object) -> None:
        self.name, self.seconds, self.python = name, [], []
        self.parameters = {
            key: torch.nn.Parameter(torch.zeros(shape)) for key, shape in resnet50().items()
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


def seed(number: int) -> None:
    torch.manual_seed(number)


def random_gradients() -> dict[str, torch.Tensor]:
    return {key: torch.randn(shape) for key, shape in resnet50().items()}
