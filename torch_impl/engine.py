"""Horovod under PyTorch: collectives are asynchronous, and have names."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import torch

from hvd_compress.engines.named import NamedEngine, Op, ProcessSetEngine
from hvd_compress.requests import Collective

from .backend import from_numpy

#: what Horovod says of a collective whose connections have ended names no cause
_LOST = (
    "hvd_compress: a rank has ended or is stopped, or the network to it is down: look for its own "
    "message, and for what the launcher says of it; the others report after it. A longer time-out "
    "under Gloo: HOROVOD_GLOO_TIMEOUT_SECONDS (30 if not set)"
)


def _held(tensor: torch.Tensor) -> torch.Tensor:
    """An alias of the tensor that refers to it in C++."""
    alias = tensor.detach()
    alias.grad = tensor
    return alias


class TorchEngine(NamedEngine):
    """The base class of engines whose collectives work on torch tensors."""

    def _carry(self, request: Collective, name: str) -> Generator[Op, Any, Any]:
        """Arrays of NumPy travel as tensors in the same memory, and so do the replies."""
        if not isinstance(request.arrays[0], np.ndarray):
            return (yield from super()._carry(request, name))
        tensors = request.carrying([from_numpy(x, None) for x in request.arrays])
        reply = yield from super()._carry(tensors, name)
        return [x.numpy() for x in reply] if isinstance(reply, list) else reply.numpy()

    def _splits(self, sizes: Sequence[int]) -> torch.Tensor:
        return torch.tensor(sizes, dtype=torch.int32)


class HorovodEngine(TorchEngine, ProcessSetEngine):
    """Collectives of ``horovod.torch``, which is ``hvd``; see :class:`ProcessSetEngine`."""

    def __init__(self, hvd: Any, process_set: Any, predivide: float = 1.0) -> None:
        super().__init__(process_set, predivide)
        self._hvd = hvd

    @property
    def prefix(self) -> str:  # type: ignore[override]
        return self._numbered("hvd_compress")

    def _launch(self, op: Op) -> Any:
        # Whoever submits wants Horovod's table of process sets with Python's lock in hand.  While
        # Horovod's thread ends it has that table, so to ask first waits for it without the lock.
        self._check_is_running()
        try:
            handle = self._submit_to_horovod(op)
        except ValueError as error:
            if "same name" not in str(error):
                raise
            # Left behind by a set of workers of the same size: elastic training makes another.
            raise self._hvd.mpi_ops.HorovodInternalError(error) from None
        # The thread may also end after the answer, and then drops all tensors that are pending.
        # PyTorch 2.13 takes Python's lock for that, and neither would move on, unless the tensor is
        # held by something in C++, too, as an alias holds its gradient.
        pending = self._hvd.mpi_ops._handle_map
        *inputs, outputs = pending[handle]
        tensors = [*inputs, *(outputs if isinstance(outputs, tuple) else [outputs])]
        pending[handle] = (*map(_held, tensors), *pending[handle])
        return handle

    def _submit_to_horovod(self, op: Op) -> Any:
        hvd, common = self._hvd, {"name": op.name, "process_set": self._set}
        if op.splits is not None:
            return hvd.alltoall_async(op.tensor, op.splits, **common)
        if op.kind == "sum":
            reduce = hvd.allreduce_async_ if op.in_place else hvd.allreduce_async
            return reduce(op.tensor, op=hvd.Sum, **common)
        if op.kind == "max":
            return hvd.allreduce_async(op.tensor, op=hvd.Max, **common)
        if op.kind == "broadcast":
            return hvd.broadcast_async(op.tensor, self._global_rank(op.root), **common)
        return hvd.allgather_async(op.tensor, **common)

    def _wait(self, handle: Any) -> Any:
        if not self._hvd.poll(handle):
            try:
                self._check_is_running()
            except self._hvd.mpi_ops.HorovodInternalError:
                # What came in just after Horovod's thread had emptied its queue is never done.
                if not self._hvd.poll(handle):
                    raise
        try:
            return self._hvd.synchronize(handle)
        except self._hvd.mpi_ops.HorovodInternalError as error:
            if not any(word in str(error).lower() for word in ("shut down", "gloo", "connection")):
                raise
            raise type(error)(f"{error}\n{_LOST}") from error

    def _has_come(self, handle: Any) -> bool:
        return bool(self._hvd.poll(handle))

    def _check_is_running(self) -> None:
        """Raise ``HorovodInternalError`` if Horovod's thread has ended, as it does when a worker
        dies: it makes all process sets void."""
        try:
            self._set.size()
        except ValueError:
            raise self._hvd.mpi_ops.HorovodInternalError(
                "Horovod no longer runs: a rank has ended, perhaps because it had fewer batches "
                "(give all ranks equally many) or failed (hvd.elastic.run goes on without it); or "
                "hvd.shutdown() was called, after which hvd.init() starts it again"
            ) from None

    def _sum_bfloat16(self, op: Op) -> Generator[Op, Any, torch.Tensor]:
        """Sum a bfloat16 array.  Horovod cannot add these, but it can carry their bits: every rank
        adds one part, in float32, and gives the rounded sum to all.  This sends as many bytes as a
        ring."""
        bits, size = op.tensor.view(torch.int16), self.size
        splits = self._splits([part.numel() for part in torch.tensor_split(bits, size)])
        mine, _ = yield Op("alltoall", f"{op.name}.scatter", bits, splits)
        summed = mine.view(torch.bfloat16).view(size, -1).float().sum(0)
        total = yield Op("gather", f"{op.name}.gather", summed.bfloat16().view(torch.int16))
        return total.view(torch.bfloat16)
