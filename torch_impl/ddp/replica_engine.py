"""The engine between replicas, over a process group of ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from hvd_compress.engines.named import Op

from ..replicas import group_of
from .hook import ProcessGroupEngine


class ReplicaEngine(ProcessGroupEngine):
    """Exchanges between replicas, in which half precisions are added in float32: 16 bits travel, as
    many as in a ring, and the sum is rounded once.

    Attributes:
        group: the process group.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self.group = group

    def _sum(self, array: torch.Tensor, name: str) -> Generator[Op, Any, torch.Tensor]:
        half = array.dtype in (torch.float16, torch.bfloat16)
        if not half or self.size == 2:  # where there is one addition, which every library rounds so
            return (yield Op("sum", name, array))
        flat = array.reshape(-1)
        parts = torch.tensor_split(flat, self.size)
        splits = self._splits([part.numel() for part in parts])
        arriving = self._splits([parts[self.rank].numel()] * self.size)
        mine, _ = yield Op("alltoall", f"{name}.scatter", flat, splits, arriving)
        summed = mine.view(self.size, -1).float().sum(0).to(array.dtype)
        total = yield Op("gather", f"{name}.gather", summed)
        return total.view(array.shape)

    _sum_bfloat16 = _sum


def engine_over(replicas: Any) -> ReplicaEngine:
    """Return an engine over a mesh of one dimension, or a process group."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the current one
    return ReplicaEngine(group_of(replicas), device)
