"""Memory that training takes beyond the parameters, on each rank, in multiples of them.

    python benchmarks/memory.py                        # two ranks, 50 million parameters
    python benchmarks/memory.py --methods dgc fp8
    python benchmarks/memory.py --json benchmarks/memory.json      # as docs/methods.md has it

Each method trains in a job of its own: real Horovod, PyTorch, SGD with momentum 0.9, eight square
matrices.  "resident" is what the process has after some steps, "peak" the most that it ever had,
both less what it had before the first backward pass, so gradients count: SGD alone has 2, a
gradient and a momentum.  Methods that take momentum over keep it in their own state, and the
optimizer none; those of 1-bit Adam and its kind train by their own optimizers.  The C library is
told to give large blocks back at once, or what it keeps for later would count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm
from turns import write_rows

from hvd_compress.cli.options import parser_of
from hvd_compress.launch import under_horovodrun
from hvd_compress.methods import as_compressor, method_names

COLUMNS = ("resident", "peak")
#: beside the methods: no exchange at all, and Horovod's own optimizer
PLAIN = ["SGD alone", "Horovod dense", "Horovod fp16"]

parser = parser_of(__doc__)
parser.add_argument("--methods", nargs="+", default=[*PLAIN, *method_names()], metavar="METHOD")
parser.add_argument("--side", type=int, default=2500, help="of the eight matrices")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument(
    "--json",
    type=Path,
    metavar="FILE",
    help="write what was measured, as it comes; other rows stay",
)
parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)


def main() -> None:
    options = parser.parse_args()
    if options.one:
        measure(options)
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for method in tqdm(options.methods, ncols=90):
            file = Path(folder) / "measured.json"
            own = ["--one", method, str(file), "--side", str(options.side)]
            own += ["--steps", str(options.steps), "--ranks", str(options.ranks)]
            command = [sys.executable, __file__, *own]
            environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=600
            )
            if done.returncode:
                raise SystemExit(f"{method} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
            found[method] = dict(zip(COLUMNS, json.loads(file.read_text()), strict=True))
            if options.json:
                known = json.loads(options.json.read_text()) if options.json.exists() else {}
                write_rows(known | found, options.json)
    million = 8 * options.side**2 / 1e6
    print(f"\n{million:g} million parameters, {options.ranks} ranks; multiples of the parameters")
    print(f"{'':18}" + "".join(f"{column:>10}" for column in COLUMNS))
    for method, row in found.items():
        print(f"{method:18}" + "".join(f"{row[column]:10.2f}" for column in COLUMNS))


def measure(options: argparse.Namespace) -> None:
    """Train by one method as one of the ranks, and write what rank 0 has taken."""
    under_horovodrun(options.ranks, "mpi")
    import horovod.torch as horovod
    import torch

    import hvd_compress.torch as hvd

    method, file = options.one
    hvd.init()
    torch.set_num_threads(1)
    side = options.side
    torch.manual_seed(0)  # the same weights on all ranks
    parameters = [torch.nn.Parameter(torch.randn(side, side)) for _ in range(8)]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    if method.startswith("Horovod"):
        of = getattr(horovod.Compression, "fp16" if "fp16" in method else "none")
        optimizer = horovod.DistributedOptimizer(optimizer, named, compression=of)
    elif method != "SGD alone":
        compression = as_compressor(method)
        if compression.partner:  # a part of an optimizer of its own
            own = getattr(hvd, compression.partner)(parameters, lr=0.01)
            optimizer, compression = own, own.compressor()
        optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression)
    torch.randn(side, side) @ torch.randn(side, side)  # what libraries keep for themselves
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    before = status("VmRSS")
    for _ in range(options.steps):
        optimizer.zero_grad()
        for p in parameters:
            (0.5 * p.square().sum()).backward()
        optimizer.step()
    size = 8 * side**2 * 4
    found = [round((status(key) - before) / size, 2) for key in ("VmRSS", "VmHWM")]
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps(found))


def status(key: str) -> int:
    """Bytes that the kernel counts for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


if __name__ == "__main__":
    main()
