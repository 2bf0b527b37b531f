"""Horovod under PyTorch: asynchronous, every collective named after its parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any, ClassVar

import torch

from hvd_compress.engines.base import LENGTH
from hvd_compress.engines.named import FlightEngine, Op, ProcessSetEngine
from hvd_compress.errors import PayloadError


class TorchFlightEngine(FlightEngine):
    """What collectives on torch tensors have in common."""

    def _split(self, own: torch.Tensor, everything: torch.Tensor) -> list[torch.Tensor]:
        if everything.numel() != own.numel() * self.size:
            raise PayloadError(
                f"the ranks' payloads differ in size: this rank's has {own.numel()} bytes, "
                f"those of all {self.size} together {everything.numel()}. Do all run the same "
                "version with the same compression options, or is a gradient sparse on some and "
                "dense on others (sparse_as_dense=True)?"
            )
        return list(torch.tensor_split(everything, self.size))

    def _splits(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.tensor(sizes, dtype=torch.int32)

    def _with_length(self, payload: torch.Tensor) -> torch.Tensor:
        length = torch.tensor([payload.numel()], dtype=torch.int64).view(torch.uint8)
        return torch.cat([length.to(payload.device), payload])

    def _split_by_length(self, everything: torch.Tensor) -> list[torch.Tensor]:
        parts, start = [], 0
        for rank in range(self.size):
            head = everything[start : start + LENGTH]
            length = int.from_bytes(bytes(head.tolist()), "little", signed=True)
            start += LENGTH
            if head.numel() != LENGTH or not 0 <= length <= everything.numel() - start:
                raise PayloadError(
                    f"the message of rank {rank} starts with a length of {length}, which cannot "
                    "be: it was damaged, or the parameter's gradient is sparse on some ranks and "
                    "dense on others; pass sparse_as_dense=True to hvd.DistributedOptimizer then"
                )
            parts.append(everything[start : start + length])
            start += length
        return parts


class HorovodEngine(TorchFlightEngine, ProcessSetEngine):
    """Collectives of ``horovod.torch``, which is ``hvd``; see :class:`ProcessSetEngine`."""

    #: engines made so far, by process set; in the same order on all of its ranks
    _made: ClassVar[Counter[Any]] = Counter()

    def __init__(self, hvd: Any, process_set: Any, predivide: float = 1.0) -> None:
        super().__init__(process_set, predivide)
        self._hvd = hvd
        # Two optimizers may be in the middle of a step at once.
        self.agreement_name = f"agreement.{self._made[process_set.process_set_id]}"
        self._made[process_set.process_set_id] += 1

    def _launch(self, kind: str, ops: Sequence[Op]) -> Any:
        hvd, name, common = self._hvd, ops[0].name, {"process_set": self._set}
        if kind in ("alltoall", "swap"):
            return hvd.alltoall_async(ops[0].tensor, ops[0].splits, name=name, **common)
        if kind == "sum":
            common |= {"op": hvd.Sum, **self._scales}
        elif kind == "max":
            common |= {"op": hvd.Max}
        verb = "allgather_async" if kind.startswith("gather") else "allreduce_async"
        if len(ops) > 1:
            return getattr(hvd, f"grouped_{verb}")([op.tensor for op in ops], name=name, **common)
        return getattr(hvd, verb)(ops[0].tensor, name=name, **common)

    def _wait(self, handle: Any, count: int) -> list[Any]:
        result = self._hvd.synchronize(handle)
        return list(result) if count > 1 else [result]

    def _sum_bfloat16(self, array: torch.Tensor, name: str) -> Generator[Op, Any, torch.Tensor]:
        """Horovod cannot add bfloat16, but it can carry its bits: every rank adds one part, in
        float32, and gives the rounded sum to all.  Moves as many bytes as a ring."""
        size, parts = self.size, torch.tensor_split(array.view(torch.int16), self.size)
        splits = self._splits([part.numel() for part in parts])
        mine, _ = yield Op("alltoall", f"{name}.scatter", torch.cat(parts), splits)
        summed = mine.view(torch.bfloat16).view(size, -1).float().sum(0)
        total = yield Op("gather", f"{name}.gather", summed.bfloat16().view(torch.int16))
        return total.view(torch.bfloat16)
