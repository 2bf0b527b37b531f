"""The campaign of memory: what a process has, over steps and over optimizers.

Over MPI.  "grows" is by how much the resident memory of a rank is more at the end than after the
first half, when all has been made that is kept.  An optimizer takes two steps and is dropped, with
its model.
"""

from __future__ import annotations

import argparse
import functools
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hvd_compress.cli.tables import text_table
from hvd_compress.launch import under_mpirun

#: bytes by which memory may grow: pages that the C library keeps, in some order
ALLOWED = 3 * 2**20


def run(options: argparse.Namespace) -> list[str]:
    """Run the campaign on each of the ranks; return what grew."""
    under_mpirun(options.ranks)
    import torch

    import hvd_compress.torch.mpi as hvd

    hvd.init()
    torch.set_num_threads(1)
    table, problems = [], []
    for method in tqdm(options.only, ncols=90, disable=hvd.rank() > 0):
        row = [method]
        for turn, count in (
            (trained(method), options.steps),
            (made_and_dropped(method), options.optimizers),
        ):
            after, grows = over(turn, count)
            row += [f"{count:,}", f"{after / 2**20:.1f}", f"{grows / 2**10:.0f} KiB"]
            if grows > ALLOWED:
                problems.append(f"{method}, {count} times: grows by {grows} bytes")
        table.append(row)
    if hvd.rank():
        return []
    print(text_table(("", "steps", "MiB", "grows", "optimizers", "MiB", "grows"), table))
    return problems


def over(turn: Callable[[int], None], count: int) -> tuple[int, int]:
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
    return after, after - before


def trained(method: str) -> Callable[[int], None]:
    """Return what takes a step of one optimizer."""
    return functools.partial(_step, *_distributed(method))


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
