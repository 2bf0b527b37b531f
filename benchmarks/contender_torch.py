"""What ``sync_resnet50.py`` times under PyTorch."""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import hvd_compress.torch as hvd
import hvd_compress.torch.mpi as over_mpi  # noqa: F401  the other one that a contender may use
from hvd_compress import kernels
from hvd_compress.advisor.shapes import Shapes, resnet50


class Contender:
    """One optimizer over parameters of its own.  A sample is the time from the start of backward,
    which is one multiplication a tensor, to the last averaged gradient.  ``steps`` are the seconds
    of the optimizer's steps that follow."""

    def __init__(
        self,
        name: str,
        compression: object,
        shapes: Shapes | None = None,
        over: Any = hvd,  # or ``over_mpi``
        **options: object,
    ) -> None:
        self.name, self.seconds, self.steps, self.python = name, [], [], []
        self.parameters = {
            key: torch.nn.Parameter(torch.zeros(shape))
            for key, shape in (shapes or resnet50()).items()
        }
        over.init()
        self.optimizer = over.DistributedOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=0.01, momentum=0.9),
            named_parameters=[(f"{name}.{key}", p) for key, p in self.parameters.items()],
            compression=compression,
            **options,
        )
        self.compression: Any = getattr(self.optimizer, "compression", None)

    def sample(self, gradients: dict[str, torch.Tensor]) -> float:
        self.optimizer.zero_grad()
        loss = sum((p * gradients[key]).sum() for key, p in self.parameters.items())
        hvd.barrier()
        start = time.perf_counter()
        loss.backward()
        self.optimizer.synchronize()
        end = time.perf_counter()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        seconds = torch.tensor([end - start, time.perf_counter() - end])
        synchronized, stepped = hvd.allreduce(seconds, op=hvd.Max, name="seconds").tolist()
        self.steps.append(stepped)
        return synchronized


class Backward:
    """What all rows contain: backward alone, on all ranks at once, with hooks that do nothing."""

    compression = None

    def __init__(self, name: str, shapes: Shapes | None = None) -> None:
        self.name, self.seconds, self.steps, self.python = name, [], [], []
        self.parameters = torch.nn.ParameterDict(
            {
                key.replace(".", "/"): torch.nn.Parameter(torch.zeros(shape))
                for key, shape in (shapes or resnet50()).items()
            }
        )
        self.module = _Products(self.parameters)

    def sample(self, gradients: dict[str, torch.Tensor]) -> float:
        self.module.zero_grad()
        loss = self.module(gradients)
        hvd.barrier()
        start = time.perf_counter()
        loss.backward()
        seconds = torch.tensor(time.perf_counter() - start)
        return hvd.allreduce(seconds, op=hvd.Max, name="seconds").item()


class _Products(torch.nn.Module):
    def __init__(self, parameters: torch.nn.ParameterDict) -> None:
        super().__init__()
        self.own = parameters

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((p * gradients[key.replace("/", ".")]).sum() for key, p in self.own.items())


class DDP(Backward):
    """PyTorch's DistributedDataParallel on Gloo, with one of its own communication hooks, or with
    this package's and a method."""

    def __init__(self, name: str, hook: Any = None) -> None:
        super().__init__(name)
        start_process_group()
        # The callbacks of PowerSGD's hook may run in another order on each rank, unless there is
        # but one bucket.
        more = {"bucket_cap_mb": 1024} if hook == "powersgd" else {}
        group = dist.new_group()
        self.module = torch.nn.parallel.DistributedDataParallel(
            self.module, process_group=group, **more
        )
        if hook == "fp16":
            self.module.register_comm_hook(group, default_hooks.fp16_compress_hook)
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(group, 2, start_powerSGD_iter=2)
            self.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif hook is not None:
            hook = hvd.as_compressor(hook)
            momentum = 0.9 if hook.takes_momentum else None
            state = hvd.DDPState(hook, self.module, process_group=group, momentum=momentum)
            self.module.register_comm_hook(state, hvd.ddp_hook)
            self.compression = state


def start_process_group(over: Any = hvd) -> None:
    """Over the first network that is not of one machine, if the ranks are on several."""
    if dist.is_initialized():
        return
    alone = over.local_size() == over.size()
    for _, interface in socket.if_nameindex():
        name = interface.encode()[:15]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name))
            except OSError:  # has no address
                continue
        address = socket.inet_ntoa(found[20:24])
        if address.startswith("127.") == alone:
            break
    with socket.socket() as probe:
        probe.bind((address, 0))
        place = over.broadcast_object((address, probe.getsockname()[1]), 0)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    url = f"tcp://{place[0]}:{place[1]}"
    dist.init_process_group("gloo", url, rank=over.rank(), world_size=over.size())


_SIOCGIFADDR = 0x8915


class Stream:
    """The floor of a step without a network: every rank reads its gradients, velocities and
    residuals, and writes the latter two."""

    def __init__(self, name: str) -> None:
        self.name, self.seconds, self.steps = name, [], []
        self.python, self.compression = [], None
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
        self.name, self.seconds, self.steps = name, [], []
        self.python, self.compression = [], None
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
