"""Time of steps whose gradients are on a GPU: from the start of backward to the last average.

    mpirun -np 2 python benchmarks/gpu_steps.py                  # optimizers over MPI
    torchrun --nproc-per-node 1 benchmarks/gpu_steps.py --over ddp   # hooks of DDP over NCCL

Ranks share the GPU if there are more of them than GPUs, which NCCL refuses: on one GPU, hooks run
on one rank, and show what they do beside the exchange.  Gradients are random, in the model's
shapes, and backward is one multiplication a tensor.  Methods take turns; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.advisor.shapes import MODELS

USUAL = ["none", "fp16", "powersgd:rank=2", "topk:density=0.01", "dgc", "onebit", "qsgd", "fp8"]

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--over", choices=("mpi", "ddp"), default="mpi")
parser.add_argument("--model", choices=MODELS, default="resnet50", help="whose shapes")
parser.add_argument("--methods", nargs="+", default=USUAL)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--warmup", type=int, default=6, help="rounds that are not counted")


class Products(torch.nn.Module):
    """Backward gives each parameter the numbers that forward was given for it."""

    def __init__(self, shapes: dict[str, Any]) -> None:
        super().__init__()
        self.own = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes.values())

    def forward(self, numbers: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * x).sum() for p, x in zip(self.own, numbers, strict=True))


def over_mpi(method: str, model: torch.nn.Module) -> tuple[torch.nn.Module, Callable[[], None]]:
    import hvd_compress.torch.mpi as hvd  # not for --help: it starts MPI

    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        sgd, named_parameters=model.named_parameters(), compression=method
    )
    return model, optimizer.synchronize


def over_ddp(method: str, model: torch.nn.Module) -> tuple[torch.nn.Module, Callable[[], None]]:
    from hvd_compress.torch.ddp.hook import DDPState, ddp_hook

    wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    if method == "DDP fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == "DDP powersgd":
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method != "DDP":
        momentum = {"momentum": 0.9} if method.startswith("dgc") else {}
        wrapped.register_comm_hook(DDPState(method, wrapped, **momentum), ddp_hook)
    return wrapped, lambda: None


def main() -> None:
    options = parser.parse_args()
    if options.over == "mpi":
        import hvd_compress.torch.mpi as hvd
    if options.over == "ddp":
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        rank, size, wrap = dist.get_rank(), dist.get_world_size(), over_ddp
        options.methods[:0] = ["DDP", "DDP fp16", "DDP powersgd"]
    else:
        hvd.init()
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
        rank, size, wrap = hvd.rank(), hvd.size(), over_mpi

    def slowest(seconds: float) -> float:
        if options.over == "mpi":
            return hvd.allreduce(torch.tensor(seconds), op=hvd.Max).item()
        found = torch.tensor(seconds, device="cuda")
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.item()

    shapes = MODELS[options.model]()
    torch.manual_seed(rank)
    rows = [wrap(method, Products(shapes).cuda()) for method in options.methods]
    times: list[list[float]] = [[] for _ in rows]
    for _ in range(options.warmup + options.rounds):
        numbers = [torch.randn(shape, device="cuda") for shape in shapes.values()]
        for own, (model, finish) in zip(times, rows, strict=True):
            loss = model(numbers)
            torch.cuda.synchronize()
            slowest(0.0)
            start = time.perf_counter()
            loss.backward()
            finish()
            torch.cuda.synchronize()
            own.append(slowest(time.perf_counter() - start))
            model.zero_grad(set_to_none=options.over == "mpi")
    if rank == 0:
        print(f"{options.model}, {size} ranks over {options.over}, {torch.cuda.get_device_name()}")
        for method, own in zip(options.methods, times, strict=True):
            print(f"{method:24}{1000 * statistics.median(own[options.warmup :]):9.2f} ms")
    if options.over == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
