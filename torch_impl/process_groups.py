"""Engines over process groups of ``torch.distributed``."""

from __future__ import annotations

import atexit
import time
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from hvd_compress.engines.named import InFlight, Op

from . import backend
from .engine import TorchEngine
from .lost_ranks import naming_lost_ranks
from .replicas import group_of

# Their names before PyTorch 2.13 were others.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Gloo's threads let go of the last collective a moment after it is over, and abort if Python has
# ended by then; PyTorch alone does so too, if rarely.
atexit.register(time.sleep, 0.05)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessGroupEngine(TorchEngine):
    """Exchanges over a process group of ``torch.distributed``, which all ranks start in the same
    order.

    Arrays in host memory that travel over NCCL come back in one copy, however many ranks there are,
    and the host waits for it once.  It looks at comparisons over NCCL in the next step, since it
    would wait for all the work of the GPU.

    Args:
        group: the process group; ``None`` for the default one.
        device: that of the gradients.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__()
        # Kept, since DDP's reducer may not be the last that has it: it would join Gloo's threads
        # with the interpreter's lock, for which one waits that frees the tensor of a collective.
        self.group: Any = dist.group.WORLD if group is None else group
        self._device = device
        #: the comparison of the last step, and its reply on its way to the host
        self._compared: tuple[InFlight, backend.Arriving] | None = None

    def _bring_in_agreement(self, at_once: bool = False) -> None:
        now = self._agreement
        if now is None:
            return
        before, self._compared = self._compared, None
        if not at_once and self._arrives_late(now.handle):
            self._agreement = None
            self._compared = now, backend.Arriving(self._wait(now.handle))
        if before is not None:
            each, reply = before
            self._advance(each, reply.arrived())
            self._bring_in([each])
            self._note(each.result)
        super()._bring_in_agreement()

    def _arrives_late(self, handle: Any) -> bool:
        """Whether a reply is in a GPU's memory, when this has done all that was asked of it."""
        is_staged, _, reply, _ = handle
        return bool(reply.is_cuda) and not is_staged

    def abandon(self) -> None:
        super().abandon()
        if self._compared is not None:
            self._compared[0].ops.close()
            self._compared = None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def _has_come(self, handle: Any) -> bool:
        return True  # all ranks come here, in the same order

    def _divisor(self, wire: str | None) -> float:
        """As PyTorch's hooks do, but by a power of two, which leaves the significands as they
        are."""
        return 2.0 ** (self.size - 1).bit_length() if wire == "float16" else 1.0

    def _launch(self, op: Op) -> Any:
        # Whether the result belongs into host memory, the collective, the tensor that its result
        # will be in, and what to wait for.
        with naming_lost_ranks(self.group):
            is_staged = not self.reads_host and not op.tensor.is_cuda
            return is_staged, *self._started(op._replace(tensor=self._reachable(op.tensor)))

    def _wait(self, handle: Any) -> Any:
        with naming_lost_ranks(self.group):
            return self._received(handle)

    def _started(self, op: Op) -> tuple[Op, torch.Tensor, Any]:
        if op.arriving is not None:
            return self._alltoall_single(op, op.arriving.tolist())
        if op.splits is not None:
            sizes = self._reachable(op.splits)
            theirs = torch.empty_like(sizes)
            work = dist.all_to_all_single(theirs, sizes, group=self.group, async_op=True)
            return op, theirs, work
        if op.kind == "broadcast":
            result = op.tensor.contiguous().clone()
            root = dist.get_global_rank(self.group, op.root)
            work = dist.broadcast(result, root, group=self.group, async_op=True)
            return op, result, work
        tensor = op.tensor.reshape(-1)
        if op.kind in _OPS:
            total = tensor if op.in_place else tensor.clone()  # reductions are in place
            work = dist.all_reduce(total, _OPS[op.kind], group=self.group, async_op=True)
            return op, total, work
        if op.kind == "gather_equal":
            everything = tensor.new_empty(self.size * tensor.numel())
            return op, everything, self._all_gather(everything, tensor)
        size = self._reachable(torch.tensor([tensor.numel()]))
        sizes = size.new_empty(self.size)
        return op, sizes, self._all_gather(sizes, size)

    @property
    def reads_device(self) -> bool:  # type: ignore[override]  # others' is a constant
        return "cuda:nccl" in dist.get_backend_config(self.group)

    @property
    def reads_host(self) -> bool:
        """Whether tensors in host memory are sent from there, which NCCL alone does not do."""
        return "cpu:" in dist.get_backend_config(self.group)

    def _reachable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor where the library can read it."""
        if tensor.is_cuda or self.reads_host:
            return tensor
        if self._device.type == "cuda":  # or this would wait for all that the GPU still has to do
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _alltoall_single(self, op: Op, mine: list[int]) -> tuple[Op, torch.Tensor, Any]:
        received = op.tensor.new_empty(sum(mine))
        sizes = op.splits.tolist()
        work = dist.all_to_all_single(
            received, op.tensor, mine, sizes, group=self.group, async_op=True
        )
        return op, received, work

    def _all_gather(self, into: torch.Tensor, x: torch.Tensor) -> Any:
        return all_gather(into, x, group=self.group, async_op=True)

    def _received(self, handle: Any) -> Any:
        is_staged, op, received, work = handle
        work.wait()
        sizes: Any = None
        if op.splits is not None and op.arriving is None:
            sizes = received.tolist()
            _, received, work = self._alltoall_single(op, sizes)
            work.wait()
        elif op.kind == "gather":
            sizes = received.tolist()
            # Ranks' messages have different lengths: they are sent as long as the longest.
            padded = op.tensor.new_zeros(max(sizes))
            padded[: op.tensor.numel()] = op.tensor
            everything = padded.new_empty(self.size * padded.numel())
            self._all_gather(everything, padded).wait()
            rows = everything.view(self.size, -1)
            received = torch.cat([row[:n] for row, n in zip(rows, sizes, strict=True)])
        if is_staged and received.dtype == torch.bfloat16:  # which NumPy lacks
            received = received.cpu()
        elif is_staged:
            received = torch.from_numpy(backend.to_numpy(received))
        if op.splits is not None:
            return received, sizes
        return received.view(op.tensor.shape) if op.kind in (*_OPS, "broadcast") else received


class ReplicaEngine(ProcessGroupEngine):
    """Exchanges between replicas, in which half precisions are added in float32.  The messages have
    16 bits, as many as in a ring, and the sum is rounded once."""

    def _sum(self, op: Op) -> Generator[Op, Any, torch.Tensor]:
        array, name = op.tensor, op.name
        half = array.dtype in (torch.float16, torch.bfloat16)
        if not half or self.size == 2:  # where there is one addition, which every library rounds so
            return (yield op)
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
