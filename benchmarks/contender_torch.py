"""The contenders that ``steps.py`` times under PyTorch."""

from __future__ import annotations

import abc
import contextlib
import importlib
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import hvd_compress.torch as hvd
import hvd_compress.torch.mpi as over_mpi
from hvd_compress import kernels
from hvd_compress.advisor.shapes import Shapes

Gradients = Mapping[str, torch.Tensor]
DENSITY, RANK, LR, MOMENTUM = 0.001, 2, 0.01, 0.9


class AbsentError(Exception):
    """Why there is no such row."""


class Contender:
    """The work that a row times, from backward to the step of SGD.

    Backward is one multiplication a tensor, and sleeps until each tensor is due, which is in
    proportion to the elements; so the processor is free meanwhile, as beside a GPU.  Contenders
    have parameters of their own, which lie in the same memory, and no gradients between steps.

    Attributes:
        compression: has the statistics, of methods of this package.
        sent: bytes of a rank's messages in a step where there are no statistics, if known.
    """

    compression: Any = None
    sent: float | None = None

    def __init__(self, name: str, weights: Gradients) -> None:
        self.name = name
        self.parameters = {key: torch.nn.Parameter(x) for key, x in weights.items()}
        self.elements = sum(p.numel() for p in self.parameters.values())
        self.module: torch.nn.Module = _Products(self.parameters)
        self.sgd = torch.optim.SGD(self.parameters.values(), lr=LR, momentum=MOMENTUM)

    def sample(self, gradients: Gradients, backward: float) -> tuple[float, float]:
        """Return seconds of the slowest rank, from the start of backward to the last averaged
        gradient, and of the optimizer's step that follows."""
        loss = self.module(gradients, clock := _Clock(backward, self.elements))
        hvd.barrier()
        clock.start = start = time.perf_counter()
        loss.backward()
        self.finish()
        end = time.perf_counter()
        self.step()
        seconds = torch.tensor([end - start, time.perf_counter() - end])
        for p in self.parameters.values():
            p.grad = None
        synchronized, stepped = hvd.allreduce(seconds, op=hvd.Max, name="seconds").tolist()
        return synchronized, stepped

    def finish(self) -> None:
        """Wait for the averages."""

    def step(self) -> None:
        """Apply them."""
        self.sgd.step()


class Backward(Contender):
    """Backward alone, which all others contain: a step of gradients that nobody has averaged would
    make the ranks' weights differ."""

    def step(self) -> None:
        """Leave the weights as they are."""


class _Clock:
    """When gradients are due, in the order of backward."""

    def __init__(self, backward: float, elements: int) -> None:
        self.start, self.ready, self.rate = 0.0, 0, backward / elements

    def wait(self, elements: int) -> None:
        self.ready += elements
        rest = self.start + self.ready * self.rate - time.perf_counter()
        if rest > 1e-3:
            time.sleep(rest)


class _Due(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, clock: _Clock) -> torch.Tensor:
        context.clock = clock
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        context.clock.wait(gradient.numel())
        return gradient, None


class _Products(torch.nn.Module):
    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__()
        named = [(key.replace(".", "/"), p) for key, p in parameters.items()]
        self.own = torch.nn.ParameterDict(named)  # of a dict it would sort them

    def forward(self, gradients: Gradients, clock: _Clock) -> torch.Tensor:
        own = zip(self.own.values(), gradients.values(), strict=True)
        return sum((_Due.apply(p, clock) * g).sum() for p, g in own)


class Stream(Contender):
    """The floor of a step without a network: every rank reads its gradients, velocities and
    residuals, and writes the latter two."""

    def __init__(self, name: str, weights: Gradients) -> None:
        super().__init__(name, weights)
        self._state = [(torch.zeros_like(x), torch.zeros_like(x)) for x in weights.values()]

    def sample(self, gradients: Gradients, backward: float) -> tuple[float, float]:
        rows = [(x, *own) for x, own in zip(gradients.values(), self._state, strict=True)]
        hvd.barrier()
        start = time.perf_counter()
        kernels.stream([[x.view(-1) for x in row] for row in rows])
        seconds = torch.tensor(time.perf_counter() - start)
        return hvd.allreduce(seconds, op=hvd.Max, name="seconds").item(), 0.0


class Wrapped(Contender):
    """A wrapped SGD: Horovod's, this package's over Horovod or over MPI, or the original DGC's."""

    def __init__(
        self, name: str, weights: Gradients, compression: Any, over: Any = hvd, **options: Any
    ) -> None:
        super().__init__(name, weights)
        named = [(f"{name}.{key}", p) for key, p in self.parameters.items()]
        self.optimizer = over.DistributedOptimizer(
            self.sgd, named_parameters=named, compression=compression, **options
        )
        if compression in (hvd.Compression.none, hvd.Compression.fp16):
            self.sent = self.elements * (2.0 if compression is hvd.Compression.fp16 else 4.0)
        elif over in (hvd, over_mpi):
            self.compression = self.optimizer.compression

    def finish(self) -> None:
        self.optimizer.synchronize()

    def step(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


class DDP(Contender):
    """PyTorch's DistributedDataParallel on Gloo, with one of its own communication hooks, or with
    this package's and a method."""

    BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}

    def __init__(
        self, name: str, weights: Gradients, hook: str, *, views: bool = False, **options: Any
    ) -> None:
        super().__init__(name, weights)
        start_process_group()
        group = dist.new_group()
        # The callbacks of PowerSGD's hook may run in another order on each rank, unless there is
        # but one bucket.
        more: dict[str, Any] = {"bucket_cap_mb": 1024} if hook == "powersgd" else {}
        more["gradient_as_bucket_view"] = views
        module = torch.nn.parallel.DistributedDataParallel(self.module, process_group=group, **more)
        self.module = module
        if hook in self.BYTES:
            self.sent = float(self.BYTES[hook] * self.elements)
        if hook in ("fp16", "bf16"):
            try:
                module.register_comm_hook(group, getattr(default_hooks, f"{hook}_compress_hook"))
            except TypeError as error:  # of bfloat16, where there is no NCCL
                raise AbsentError(str(error)) from None
        elif hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(group, RANK, start_powerSGD_iter=2)
            module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif hook != "fp32":
            method = hvd.as_compressor(hook)
            momentum = MOMENTUM if method.takes_momentum else None
            options |= {"process_group": group, "momentum": momentum}
            state = hvd.DDPState(method, module, **options)
            module.register_comm_hook(state, hvd.ddp_hook)
            self.compression = state


class PlainTopK(Contender):
    """Top-k with error feedback as it is commonly written, for instance in GRACE: a hook of each
    tensor calls torch.topk, and gathers values and indices from all."""

    def __init__(self, name: str, weights: Gradients) -> None:
        super().__init__(name, weights)
        self._handles: dict[str, list[Any]] = {}
        self.sent = 0.0
        for key, p in self.parameters.items():
            count = math.ceil(DENSITY * p.numel())
            self.sent += 8 * count
            residual = torch.zeros(p.numel())
            p.register_post_accumulate_grad_hook(self._hook(key, residual, count))

    def _hook(self, key: str, residual: torch.Tensor, count: int) -> Callable[[Any], None]:
        def hook(p: torch.Tensor) -> None:
            x = residual.add_(p.grad.view(-1))
            _, indices = torch.topk(x.abs(), count, sorted=False)
            values = x[indices]
            x[indices] = 0
            self._handles[key] = [
                hvd.allgather_async(part, name=f"{self.name}.{key}.{i}")
                for i, part in enumerate((values, indices.int()))
            ]

        return hook

    def finish(self) -> None:
        for key, parts in self._handles.items():
            values, indices = map(hvd.synchronize, parts)
            mean = self.parameters[key].grad.view(-1).zero_()
            mean.index_add_(0, indices.long(), values)
            mean /= hvd.size()
        self._handles.clear()


class PowerSGDPackage(Contender):
    """The package of PowerSGD's authors, which averages behind backward, over Gloo."""

    def __init__(self, name: str, weights: Gradients) -> None:
        super().__init__(name, weights)
        try:
            from powersgd import Config, PowerSGD
        except ImportError:
            raise AbsentError(
                "it is not installed, and wheels of it are empty: "
                "pip install git+https://github.com/epfml/powersgd"
            ) from None
        start_process_group()
        own = list(self.parameters.values())
        self._method = PowerSGD(own, Config(RANK, start_compressing_after_num_steps=0))

    def finish(self) -> None:
        gradients = [p.grad for p in self.parameters.values()]
        # It leaves errors in the gradients, to which the next ones are added.
        means = self._method.aggregate(gradients)
        self._errors = gradients
        for p, mean in zip(self.parameters.values(), means, strict=True):
            p.grad = mean

    def sample(self, gradients: Gradients, backward: float) -> tuple[float, float]:
        for p, error in zip(self.parameters.values(), getattr(self, "_errors", ()), strict=False):
            p.grad = error
        return super().sample(gradients, backward)


class Sharded(abc.ABC):
    """A perceptron that FSDP2 shards, with its optimizer, and the seconds of its steps.

    Args:
        name: what :meth:`shard` goes by.
        layers, width: of the perceptron.
        batch_size: of each rank.
    """

    def __init__(self, name: str, layers: int, width: int, batch_size: int) -> None:
        torch.manual_seed(0)
        self.name, self.seconds = name, list[float]()
        self._batch = batch_size, width
        self.blocks = [
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU())
            for _ in range(layers)
        ]
        self.model = torch.nn.Sequential(*self.blocks)
        self.momentum = MOMENTUM
        #: what compresses, and has the statistics; ``None``: nothing does
        self.exchange: Any = self.shard()
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=self.momentum)

    @abc.abstractmethod
    def shard(self) -> Any:
        """Call ``fully_shard`` for blocks and model, and return the exchange."""

    def step(self) -> float:
        """Take a step, and return the seconds of the slowest rank."""
        x = torch.randn(self._batch)
        self.sgd.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        self.model(x).square().mean().backward()
        self.sgd.step()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    def take(self, is_counted: bool) -> None:
        """Take a step; until one is counted, statistics begin again."""
        seconds = self.step()
        if is_counted:
            self.seconds.append(seconds)
        elif self.exchange is not None:
            self.exchange.reset_stats()


def original_dgc(name: str, weights: Gradients, checkout: Path | None) -> Contender:
    """The code of DGC's authors, with its own optimizer over Horovod."""
    if checkout is None:
        raise AbsentError(
            "name a checkout of https://github.com/synxlin/deep-gradient-compression with --dgc"
        )
    sys.path.insert(0, str(checkout))
    compression = importlib.import_module("dgc.compression")
    memory = importlib.import_module("dgc.memory").DGCSGDMemory(momentum=MOMENTUM)
    method = compression.DGCCompressor(DENSITY, memory=memory)
    named = [(f"{name}.{key}", x) for key, x in weights.items()]
    with contextlib.redirect_stdout(None):  # two lines a tensor
        memory.initialize(named)
        method.initialize((key, x) for key, x in named if x.dim() > 1)
    optimizer = importlib.import_module("dgc.horovod.optimizer")
    contender = Wrapped(name, weights, method, over=optimizer)
    for group in contender.optimizer.param_groups:
        group["momentum"] = 0.0  # it is in what arrives
    return contender


#: without --methods; all others are methods, perhaps with "DDP" before them or ENDS behind them
USUAL = (
    *("Horovod fp32", "Horovod fp16", "DDP fp32", "DDP fp16", "DDP bf16", "DDP powersgd"),
    *("powersgd package", "plain top-k", "original DGC", "fp16", "powersgd:rank=2"),
    *("topk:density=0.001", "dgc:density=0.001", "dgc:compact"),
)
ENDS = {
    ", sparse step": {"sparse_step": True},
    ", nodes": {"nodes": "auto"},
    ", views": {"views": True},
    " over MPI": {"over": over_mpi},
}


def contender(name: str, weights: Gradients, checkout: Path | None = None) -> Contender:
    """Return what a row times."""
    own = {
        "backward": Backward,
        "stream": Stream,
        "plain top-k": PlainTopK,
        "powersgd package": PowerSGDPackage,
    }
    if name in own:
        return own[name](name, weights)
    if name == "original DGC":
        return original_dgc(name, weights, checkout)
    options: dict[str, Any] = {}
    method = name
    for end, more in ENDS.items():
        if method.endswith(end):
            method, options = method.removesuffix(end), options | more
    kind, _, rest = method.partition(" ")
    if kind == "DDP":
        return DDP(name, weights, rest, **options)
    if kind == "Horovod":
        compressions = {"fp32": hvd.Compression.none, "fp16": hvd.Compression.fp16}
        return Wrapped(name, weights, compressions[rest])
    if "over" in options:
        over_mpi.init()
    return Wrapped(name, weights, hvd.as_compressor(method), **options)


def start_process_group(over: Any = hvd) -> None:
    """Over the first network that is not of one machine, if the ranks are on several."""
    if dist.is_initialized():
        return
    alone = over.local_size() == over.size()
    interface, address = next(
        (name, own.address)
        for name, addresses in psutil.net_if_addrs().items()
        for own in addresses
        if own.family == socket.AF_INET and own.address.startswith("127.") == alone
    )
    with socket.socket() as probe:
        probe.bind((address, 0))
        place = over.broadcast_object((address, probe.getsockname()[1]), 0)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    url = f"tcp://{place[0]}:{place[1]}"
    dist.init_process_group("gloo", url, rank=over.rank(), world_size=over.size())


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


def random_gradients(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {key: torch.randn(shape) for key, shape in shapes.items()}


def zeros(shapes: Shapes) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(shape) for key, shape in shapes.items()}
