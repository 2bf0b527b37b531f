"""Time of steps whose gradients are on a GPU: from the start of backward to the last average.

    mpirun -np 2 python benchmarks/gpu_steps.py                  # optimizers over MPI
    torchrun --nproc-per-node 1 benchmarks/gpu_steps.py --over ddp   # hooks of DDP over NCCL

Ranks share the GPU if there are more of them than GPUs, which NCCL refuses: on one GPU, hooks run
on one rank.  Its messages pass NCCL all the same, from the rank to itself.  Gradients are random,
in the model's shapes, and backward is one multiplication per tensor; with ``--busy`` the GPU is
kept busy as long as in a training, so that waits of the host cost what they cost there.  Methods
take turns; the slowest rank counts.  Two more steps of each count waits and launches.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hvd_compress.advisor.shapes import MODELS
from hvd_compress.cli.options import parser_of

USUAL = ["none", "fp16", "powersgd:rank=2", "topk:density=0.01", "dgc", "onebit", "qsgd", "fp8"]
#: cycles per millisecond of the clock that ``torch.cuda._sleep`` counts, about; "alone" says what
#: it was
CYCLES = 1_800_000

parser = parser_of(__doc__)
parser.add_argument("--over", choices=("mpi", "ddp"), default="mpi")
parser.add_argument("--model", choices=MODELS, default="resnet50", help="whose shapes")
parser.add_argument("--methods", nargs="+", default=USUAL)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--warmup", type=int, default=6, help="rounds that are not counted")
parser.add_argument(
    "--busy", type=float, default=0.0, help="milliseconds of other work per tensor in backward"
)
parser.add_argument("--json", help="a file for the figures, too")


class Busy(torch.autograd.Function):
    """The number itself; its gradient comes when the GPU has done other work."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, cycles: int) -> torch.Tensor:
        context.cycles = cycles
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if context.cycles:
            torch.cuda._sleep(context.cycles)
        return grad, None


class Products(torch.nn.Module):
    """Backward gives each parameter the numbers that forward was given for it."""

    def __init__(self, shapes: dict[str, Any], cycles: int = 0) -> None:
        super().__init__()
        self.own = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes.values())
        self.cycles = cycles

    def forward(self, numbers: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), device=numbers[0].device)
        for p, x in zip(self.own, numbers, strict=True):
            total = Busy.apply(total + (p * x).sum(), self.cycles)
        return total


def over_mpi(method: str, model: torch.nn.Module) -> tuple[torch.nn.Module, Callable[[], None]]:
    import hvd_compress.torch.mpi as hvd  # not for --help: it starts MPI

    if method == "alone":
        return model, lambda: None
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        sgd, named_parameters=model.named_parameters(), compression=method
    )
    return model, optimizer.synchronize


def over_ddp(method: str, model: torch.nn.Module) -> tuple[torch.nn.Module, Callable[[], None]]:
    from hvd_compress.torch.ddp.hook import DDPState, ddp_hook

    if method == "alone":
        return model, lambda: None
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


def counted(step: Callable[[], None]) -> dict[str, int]:
    """Launches and copies of a step, and waits of the host."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = sum("called a synchronizing" in str(warning.message) for warning in caught)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = sum(name.startswith("Memcpy") for name in names)
    return {"kernels": len(names) - copies, "copies": copies, "waits": waits}


def main() -> None:
    options = parser.parse_args()
    options.methods.insert(0, "alone")
    if options.over == "mpi":
        import hvd_compress.torch.mpi as hvd
    if options.over == "ddp":
        from hvd_compress.reduce.reducer import Reducer

        Reducer.keeps_engine = True
        dist.init_process_group("nccl")
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        rank, size, wrap = dist.get_rank(), dist.get_world_size(), over_ddp
        options.methods[1:1] = ["DDP", "DDP fp16", "DDP powersgd"]
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
    cycles = round(options.busy * CYCLES)
    rows = [wrap(method, Products(shapes, cycles).cuda()) for method in options.methods]
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
    figures: dict[str, dict[str, Any]] = {}
    for method, own, (model, finish) in zip(options.methods, times, rows, strict=True):

        def step(model: Any = model, finish: Any = finish) -> None:
            model(numbers).backward()
            finish()
            model.zero_grad(set_to_none=options.over == "mpi")

        milliseconds = 1000 * statistics.median(own[options.warmup :])
        figures[method] = {"ms": round(milliseconds, 2), **counted(step)}
    if rank == 0:
        print(f"{options.model}, {size} ranks over {options.over}, {torch.cuda.get_device_name()}")
        print(f"{'':24}{'ms':>9}{'beyond alone':>14}{'kernels':>9}{'copies':>9}{'waits':>9}")
        for method, row in figures.items():
            beyond = row["ms"] - figures["alone"]["ms"]
            counts = "".join(f"{row[key]:9}" for key in ("kernels", "copies", "waits"))
            print(f"{method:24}{row['ms']:9.2f}{beyond:14.2f}{counts}")
        if options.json:
            found = {**vars(options), "ranks": size, "figures": figures}
            Path(options.json).write_text(json.dumps(found, indent=1))
    if options.over == "ddp":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
