"""A communication hook for PyTorch's DistributedDataParallel, for jobs that torchrun starts::

    model = torch.nn.parallel.DistributedDataParallel(model)
    state = DDPState(DGC(momentum=0.9), model)
    model.register_comm_hook(state, ddp_hook)

The exchanges are those of every other engine.  DDP decides which gradients make a bucket and when
it leaves; what has more than one round finishes when the last bucket has left.
"""

# No postponed annotations here: DDP looks at those of its hook.

import atexit
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.base import Compressor
from hvd_compress.errors import ConfigError, SetupError
from hvd_compress.flights import Op
from hvd_compress.methods import as_compressor
from hvd_compress.momentum import check_partner
from hvd_compress.reducer import Reducer
from hvd_compress.stats import Stats
from hvd_compress.torch.engine import TorchFlightEngine

# Its name before PyTorch 2.13 was another one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Gloo's threads let go of the last collective a moment after it is over, and abort if Python has
# ended by then; PyTorch alone does so too, if rarely.
atexit.register(time.sleep, 0.05)
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessGroupEngine(TorchFlightEngine):
    """Flights over a process group of ``torch.distributed``.

    All ranks start the same flights in the same order, as DDP's buckets do.
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self._group = group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group)

    def _launch(self, kind: str, ops: Sequence[Op]) -> Any:
        """Tensors of several operations travel as one."""
        if kind in ("alltoall", "swap"):
            return self._alltoall_single(ops)
        tensors = [op.tensor.reshape(-1) for op in ops]
        fused = torch.cat(tensors)  # a copy: reductions are in place
        if kind in _OPS:
            work = dist.all_reduce(fused, _OPS[kind], group=self._group, async_op=True)
            return kind, ops, fused, fused, work
        if kind == "gather_equal":
            everything = fused.new_empty(self.size * fused.numel())
            work = self._all_gather(everything, fused)
            return kind, ops, fused, everything, work
        sizes = torch.tensor([t.numel() for t in tensors], device=fused.device)
        everyones = sizes.new_empty(self.size * len(ops))
        return kind, ops, fused, everyones, self._all_gather(everyones, sizes)

    def _alltoall_single(self, ops: Sequence[Op]) -> Any:
        (op,) = ops
        sizes = op.splits.tolist()
        mine = sizes if op.kind == "swap" else [sizes[self.rank]] * self.size
        received = op.tensor.new_empty(sum(mine))
        work = dist.all_to_all_single(
            received, op.tensor, mine, sizes, group=self._group, async_op=True
        )
        return "alltoall", ops, op.tensor, received, work

    def _all_gather(self, into: torch.Tensor, x: torch.Tensor) -> Any:
        return _all_gather_single(into, x, group=self._group, async_op=True)

    def _wait(self, handle: Any, count: int) -> list[Any]:
        kind, ops, fused, received, work = handle
        work.wait()
        if kind == "alltoall":
            return [(received, None)]
        shapes = [op.tensor.shape for op in ops]
        if kind in _OPS:
            parts = fused.split([shape.numel() for shape in shapes])
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        if kind == "gather_equal":
            rows = received.view(self.size, -1).split([shape.numel() for shape in shapes], dim=1)
            return [row.reshape(-1) for row in rows]
        # Ranks' messages have different lengths: they travel as long as the longest.
        sizes = received.view(self.size, len(ops))
        totals = sizes.sum(1).tolist()
        padded = fused.new_zeros(max(totals))
        padded[: fused.numel()] = fused
        everything = fused.new_empty(self.size * padded.numel())
        self._all_gather(everything, padded).wait()
        rows = everything.view(self.size, -1)
        messages = [
            row[:n].split(s) for row, n, s in zip(rows, totals, sizes.tolist(), strict=True)
        ]
        return [torch.cat(parts) for parts in zip(*messages, strict=True)]


class DDPState:
    """What :func:`ddp_hook` remembers: one for each model.

    Args:
        compression: a method, its class, its name, or a text such as "dgc:density=0.01".
        model: whose gradients are exchanged, inside of DistributedDataParallel or without it.
        process_group: as for DistributedDataParallel.
        momentum, nesterov: for methods that take momentum over (DGC): then the optimizer must have
            none, since a hook cannot switch it off.  ``momentum=0.0`` for none at all.
        seed: for randomness that the ranks share.

    Raises:
        ConfigError: the method takes momentum over, and none was named.
    """

    def __init__(
        self,
        compression: Any,
        model: torch.nn.Module,
        *,
        process_group: Any = None,
        momentum: float | None = None,
        nesterov: bool = False,
        seed: int = 0,
    ) -> None:
        if not dist.is_initialized():
            raise SetupError("call torch.distributed.init_process_group() first")
        method: Compressor = as_compressor(compression)
        check_partner(method, None, None)
        own = getattr(method, "momentum", None)
        if method.takes_momentum and momentum is None and own is None:
            raise ConfigError(
                f"{method.name} corrects momentum, and a hook knows nothing of the optimizer: "
                f"write DDPState({type(method).__name__}(momentum=0.9), ...) and give the "
                "optimizer momentum=0; or DDPState(..., momentum=0.0) for error feedback alone"
            )
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self._names = {p: name for name, p in inner.named_parameters()}
        self.reducer = Reducer(
            method,
            ProcessGroupEngine(process_group),
            momentum=momentum or 0.0,
            nesterov=nesterov,
            seed=seed,
        )
        self._buckets: list[tuple[Any, dict[str, torch.Tensor], torch.futures.Future[Any]]] = []

    def stats(self) -> Stats:
        """Exact bytes so far, by parameter and in total, and the norm of what waits."""
        return self.reducer.stats()

    def set_epoch(self, epoch: float) -> None:
        """Announce an epoch, for schedules by epoch."""
        self.reducer.set_epoch(epoch)

    def state_dict(self, *, consolidate: bool = True) -> dict[str, Any]:
        """For ``torch.save``.  A collective unless ``consolidate`` is false: what waits is averaged
        over the ranks, so that rank 0's state dict serves any number of ranks."""
        return self.reducer.state_dict(consolidate=consolidate)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self._buckets.clear()
        self.reducer.load_state_dict(state_dict)
        devices = {name: p.device for p, name in self._names.items()}
        for name, state in self.reducer.states.items():  # it may come from another one
            state.update({key: x.to(devices[name]) for key, x in state.items()})

    def _start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if any(p not in self._names for p in bucket.parameters()):
            raise ConfigError(
                "DDPState was made for another model than the one it is registered with"
            )
        gradients = {
            self._names[p]: g for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)
        }
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        self._buckets.append((buffer, gradients, future))
        self.reducer.start_together(gradients)
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        buckets, self._buckets = self._buckets, []
        directions = self.reducer.finish()
        for buffer, gradients, future in buckets:
            for name, gradient in gradients.items():
                gradient.copy_(directions[name])  # a view into the buffer
            future.set_result(buffer)


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``model.register_comm_hook(state, ddp_hook)``; ``state`` is a :class:`DDPState`."""
    if not isinstance(state, DDPState):
        raise ConfigError(
            f"the hook's state is {type(state).__name__}: write "
            'model.register_comm_hook(DDPState("topk", model), ddp_hook)'
        )
    return state._start(bucket)
