"""A communication hook for PyTorch's DistributedDataParallel, for jobs that torchrun starts::

    model = torch.nn.parallel.DistributedDataParallel(model)
    state = DDPState(DGC(momentum=0.9), model)  # model may be left out
    model.register_comm_hook(state, ddp_hook)

The exchanges are those of every other engine.  DDP decides which gradients make a bucket and when
it leaves; what has more than one round finishes when the last bucket has left.
"""

# No postponed annotations here: DDP looks at those of its hook.

import atexit
import functools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.base import Compressor
from hvd_compress.engines.base import LocalEngine
from hvd_compress.engines.named import Op
from hvd_compress.errors import ConfigError
from hvd_compress.integrations.optimizers import check_partner
from hvd_compress.methods import as_compressor
from hvd_compress.reducer import Reducer
from hvd_compress.stats import Stats

from .engine import TorchFlightEngine

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


class _Bucket(NamedTuple):
    """One of DDP's, and what it waits for."""

    buffer: torch.Tensor
    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    future: torch.futures.Future[torch.Tensor]


class DDPState:
    """What :func:`ddp_hook` remembers: one for each model.

    It may be made before the model and the process group, as Lightning does, and is bound by the
    first gradients that come to the hook.

    Args:
        compression: a method, its class, its name, or a text such as "dgc:density=0.01".
        model: whose gradients are exchanged, inside of DistributedDataParallel or without it.
            Without it, parameters are called by their place in it, "parameter.0", in statistics,
            checkpoints and rules by name.
        process_group: as for DistributedDataParallel.
        momentum, nesterov: for methods that take momentum over (DGC): then the optimizer must have
            none, since a hook cannot switch it off.  ``momentum=0.0`` for none at all.
        seed: for randomness that the ranks share.

    Raises:
        ConfigError: the method takes momentum over, and none was named; or, from the hook, this
            state belongs to another model.
    """

    def __init__(
        self,
        compression: Any,
        model: torch.nn.Module | None = None,
        *,
        process_group: Any = None,
        momentum: float | None = None,
        nesterov: bool = False,
        seed: int = 0,
    ) -> None:
        method: Compressor = as_compressor(compression)
        check_partner(method, None, None)
        own = getattr(method, "momentum", None)
        if method.takes_momentum and momentum is None and own is None:
            raise ConfigError(
                f"{method.name} corrects momentum, and a hook knows nothing of the optimizer: "
                f"write DDPState({type(method).__name__}(momentum=0.9), ...) and give the "
                "optimizer momentum=0; or DDPState(..., momentum=0.0) for error feedback alone"
            )
        self._group = process_group
        self._make = functools.partial(
            Reducer, method, momentum=momentum or 0.0, nesterov=nesterov, seed=seed
        )
        #: of a world of one until there is a process group: it knows the epoch
        self.reducer = self._make(LocalEngine())
        self._names: dict[torch.Tensor, str] = {}
        self._loaded: dict[str, Any] | None = None
        self._is_bound = False
        self._buckets: list[_Bucket] = []
        if model is not None:
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            self._names = {p: name for name, p in inner.named_parameters()}
            if dist.is_initialized():
                self._bind()

    def _bind(self) -> None:
        epoch = self.reducer.epoch
        self.reducer = self._make(ProcessGroupEngine(self._group))
        self.reducer.epoch = epoch
        self._is_bound = True
        if self._loaded is not None:
            self._load(self._loaded)
            self._loaded = None

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
        """Go on where :meth:`state_dict` was taken; from the first gradients on, if there is no
        model yet."""
        if not self._is_bound:
            self._loaded = state_dict
            return
        self._buckets.clear()
        self._load(state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        devices = {name: p.device for p, name in self._names.items()}
        if unknown := set(state_dict.get("states", ())) - devices.keys():
            raise ConfigError(
                f"this state dict has a state of {min(unknown)!r}, which the model has not: load "
                "it into a DDPState that is made as the saved one was, with the model or without"
            )
        self.reducer.load_state_dict(state_dict)
        for name, state in self.reducer.states.items():  # it may come from another one
            state.update({key: x.to(devices[name]) for key, x in state.items()})

    def _start(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, parameters = bucket.buffer(), bucket.parameters()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.is_cuda else None
        )
        is_foreign = self._names and any(p not in self._names for p in parameters)
        if is_foreign or (not self._names and bucket.index() != len(self._buckets)):
            raise ConfigError(
                "this DDPState belongs to another model: make one for each, "
                "model.register_comm_hook(DDPState(...), ddp_hook)"
            )
        self._buckets.append(_Bucket(buffer, parameters, bucket.gradients(), future))
        if self._names:
            if not self._is_bound:
                self._bind()
            self.reducer.start_together(self._gradients(self._buckets[-1]))
        elif bucket.is_last():
            # DDP's first buckets go through the model from its end to its beginning.
            everyone = [p for each in reversed(self._buckets) for p in each.parameters]
            self._names = {p: f"parameter.{i}" for i, p in enumerate(everyone)}
            self._bind()
            for each in self._buckets:
                self.reducer.start_together(self._gradients(each))
        if bucket.is_last():
            self._finish()
        return future

    def _gradients(self, bucket: _Bucket) -> dict[str, torch.Tensor]:
        return {self._names[p]: g for p, g in zip(bucket.parameters, bucket.gradients, strict=True)}

    def _finish(self) -> None:
        buckets, self._buckets = self._buckets, []
        directions = self.reducer.finish()
        for bucket in buckets:
            for name, gradient in self._gradients(bucket).items():
                gradient.copy_(directions[name])  # a view into the buffer
            bucket.future.set_result(bucket.buffer)


def ddp_hook(state: DDPState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``model.register_comm_hook(state, ddp_hook)``; ``state`` is a :class:`DDPState`."""
    if not isinstance(state, DDPState):
        raise ConfigError(
            f"the hook's state is {type(state).__name__}: write "
            'model.register_comm_hook(DDPState("topk"), ddp_hook)'
        )
    return state._start(bucket)
