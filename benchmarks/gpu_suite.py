"""Everything that wants a GPU, the most valuable first, in about ten minutes, at most nineteen.

    python benchmarks/gpu_suite.py FOLDER

Each part is a command with a time limit of its own, so one that hangs takes no time from the
others.  FOLDER gets its output and the figures of the benchmarks; a line of JSON per part is
printed: what it is, its status and its seconds.  A part whose program is missing says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compile"]
STEPS = [sys.executable, "benchmarks/gpu_steps.py"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
HOOK = [*TORCHRUN, *STEPS[1:], "--over", "ddp"]
MPI = ["mpirun", "--oversubscribe", "-np", "2", sys.executable]


def parts(folder: Path) -> dict[str, tuple[int, list[str]]]:
    """Seconds at most and command by name."""
    worker = [*TORCHRUN, "tests/ddp_worker.py", str(folder / "hook")]

    def figures(name: str) -> list[str]:
        return ["--json", str(folder / f"{name}.json")]

    return {
        "steps_hook": (100, [*HOOK, *figures("steps_hook")]),
        "steps_hook_busy": (100, [*HOOK, "--busy", "0.25", *figures("steps_hook_busy")]),
        "laws_kernels": (150, [*PYTEST, "tests/torch_impl/triton_laws.py"]),
        "laws_codecs": (150, [*PYTEST, "tests/torch_impl/triton_codec_laws.py"]),
        "laws_low_rank": (90, [*PYTEST, "tests/torch_impl/triton_low_rank_laws.py"]),
        "scenarios_hook": (60, worker),
        "steps_mpi": (90, [*MPI, *STEPS[1:], "--rounds", "9", *figures("steps_mpi")]),
        "laws_methods": (200, [*PYTEST, "tests/gpu/laws.py"]),
        "collectives": (60, [*MPI, "tests/gpu/over_mpi.py"]),
        "local_step": (40, [sys.executable, "benchmarks/local_step.py", "--device", "cuda"]),
        "codecs": (60, [sys.executable, "benchmarks/codecs.py", "--device", "cuda"]),
    }


def run(name: str, seconds: int, command: list[str], folder: Path) -> dict[str, object]:
    """Run a part, and return what is to say of it."""
    if shutil.which(command[0]) is None:
        return {"part": name, "status": f"{command[0]} is missing"}
    environment = {
        **os.environ,
        "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}",
        "SCENARIOS_BACKEND": "nccl",
        "SCENARIOS_DEVICE": "cuda",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    start = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        limited = ["timeout", "--kill-after=5", str(seconds), *command]
        status = subprocess.run(limited, stdout=log, stderr=log, env=environment).returncode
    return {"part": name, "status": status, "seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="+", choices=parts(Path()), help="these only")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "hook").mkdir(exist_ok=True)
    for name, (seconds, command) in parts(options.folder).items():
        if not options.parts or name in options.parts:
            print(json.dumps(run(name, seconds, command, options.folder)), flush=True)


if __name__ == "__main__":
    main()
