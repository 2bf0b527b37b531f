"""The campaign of memory: what a process has, over steps and over optimizers.

Over MPI.  "grows" is by how much the resident memory of a rank is more at the end
than after the first half, when all has been made that is kept, and "a step" is that divided by the
steps between the two.  Of optimizers each takes two steps and is dropped, with its model.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hvd_compress.integrations.launch import under_mpirun

#: bytes by which memory may grow: pages that the C library keeps, in some order
ALLOWED = 3 * 2**20


def run(options: argparse.Namespace) -> tuple[Any, list[str]]:
    """Run the campaign on each of the ranks; return what was measured, and what grew."""
    under_mpirun(options.ranks)
    import torch

    import hvd_compress.torch.mpi as hvd

    hvd.init()
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    problems = []
    for method in tqdm(options.methods, ncols=90, disable=hvd.rank() > 0):
        found[method] = {
            "steps": over(trained(method), options.steps),
            "optimizers": over(made_and_dropped(method), options.optimizers),
        }
        for what, own in found[method].items():
            if own["grows"] > ALLOWED:
                problems.append(f"{method}, {what}: {own}")
    if hvd.rank() == 0:
        print(f"\n{'':20}{'steps':>9}{'MiB':>8}{'grows':>10}{'a step':>9}", end="")
        print(f"{'made':>8}{'MiB':>8}{'grows':>10}{'each':>9}")
        for method, rows in found.items():
            print(f"{method:20}", end="")
            for own, width in ((rows["steps"], 9), (rows["optimizers"], 8)):
                print(f"{own['count']:{width},.0f}{own['resident'] / 2**20:8.1f}", end="")
                print(f"{own['grows'] / 2**10:6.0f} KiB{own['each']:7.1f} B", end="")
            print()
    return found, problems if hvd.rank() == 0 else []


def over(turn: Callable[[int], None], count: int) -> dict[str, float]:
    """Return the resident memory after ``count`` turns, and by how much it grew in their second
    half."""
    begin = max(1, count // 2)
    for i in range(begin):
        turn(i)
    gc.collect()
    before = resident()
    for i in range(begin, count):
        turn(i)
    gc.collect()
    after = resident()
    each = (after - before) / (count - begin)
    return {"count": count, "resident": after, "grows": after - before, "each": each}


def trained(method: str) -> Callable[[int], None]:
    """Return what takes a step of one optimizer."""
    model, optimizer = _distributed(method)
    return lambda step: _step(model, optimizer, step)


def made_and_dropped(method: str) -> Callable[[int], None]:
    """Return what makes an optimizer, takes two steps, and drops it."""

    def turn(_: int) -> None:
        model, optimizer = _distributed(method)
        for step in range(2):
            _step(model, optimizer, step)

    return turn


def _distributed(method: str) -> tuple[Any, Any]:
    import torch

    import hvd_compress.torch.mpi as hvd

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(100, 200), torch.nn.Tanh(), torch.nn.Linear(200, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(optimizer, named, compression=method)


def _step(model: Any, optimizer: Any, step: int) -> None:
    import torch

    optimizer.zero_grad()
    model(torch.full((4, 100), 0.01 * (step % 7))).square().sum().backward()
    optimizer.step()


def resident() -> int:
    """Return the bytes that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])
