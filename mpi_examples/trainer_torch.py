"""The convolutional network of models.py, trained with PyTorch over MPI without Horovod."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

import hvd_compress.torch.mpi as hvd  # (1) instead of horovod.torch
from hvd_compress import Compressor
from hvd_compress.stats import Stats
from mpi_examples.models import cnn


class Trainer:
    def __init__(self, compression: Compressor, seed: int) -> None:
        hvd.init()
        torch.manual_seed(seed)
        self.model = cnn((1, 8, 8), 10)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        sgd = torch.optim.SGD(
            self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        # (2) Takes SGD's momentum over and corrects it, if the method asks for that.
        self.optimizer = hvd.DistributedOptimizer(
            sgd, named_parameters=self.model.named_parameters(), compression=compression
        )

    def set_epoch(self, epoch: int) -> None:
        self.optimizer.compression.set_epoch(epoch)

    def step(self, x: np.ndarray, y: np.ndarray, lr: float) -> float:
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()  # (3) buckets of gradients leave while it goes on
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        found = self.model(torch.from_numpy(x)).argmax(1)
        return (found == torch.from_numpy(y)).float().mean().item()

    def stats(self) -> Stats:
        return self.optimizer.compression.stats()

    def weights(self) -> list[np.ndarray]:
        return [p.detach().numpy() for p in self.model.parameters()]
