"""Everything that wants a GPU, the most valuable first, in about ten minutes, at most nineteen.

    python benchmarks/gpu_suite.py FOLDER

Each part is a command with a time limit of its own, so one that hangs takes no time from the
others.  FOLDER gets its output and the figures of the benchmarks; a line is printed for each part:
its status and its seconds.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from hvd_compress.cli.options import parser_of

TORCHRUN = f"{sys.executable} -m torch.distributed.run --nproc-per-node 1"
HOOK = f"{TORCHRUN} benchmarks/gpu_steps.py --over ddp"
MPI = f"mpirun --oversubscribe -np 2 {sys.executable}"
PYTEST = f"{sys.executable} -m pytest -q -p no:cacheprovider"
#: seconds at most and command by name
PARTS = {
    "steps_hook": (100, f"{HOOK} --json FOLDER/steps_hook.json"),
    "steps_hook_busy": (100, f"{HOOK} --busy 0.25 --json FOLDER/steps_hook_busy.json"),
    "laws_kernels": (150, f"{PYTEST} tests/torch_impl/triton_laws.py"),
    "laws_codecs": (150, f"{PYTEST} tests/torch_impl/triton_codec_laws.py"),
    "laws_step": (90, f"{PYTEST} tests/torch_impl/triton_step_laws.py"),
    "laws_low_rank": (90, f"{PYTEST} tests/torch_impl/triton_low_rank_laws.py"),
    "scenarios_hook": (60, f"{TORCHRUN} tests/ddp_worker.py FOLDER/hook"),
    "steps_mpi": (90, f"{MPI} benchmarks/gpu_steps.py --rounds 9 --json FOLDER/steps_mpi.json"),
    "laws_methods": (200, f"{PYTEST} tests/gpu/laws.py"),
    "collectives": (60, f"{MPI} tests/gpu/over_mpi.py"),
    "local_step": (40, f"{sys.executable} benchmarks/local_step.py --device cuda"),
    "codecs": (60, f"{sys.executable} benchmarks/codecs.py --device cuda"),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="these only")
    options = parser.parse_args()
    (options.folder / "hook").mkdir(parents=True, exist_ok=True)
    path = f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
    of_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    on_gpu = {"SCENARIOS_BACKEND": "nccl", "SCENARIOS_DEVICE": "cuda", "PYTHONPATH": path}
    for name in options.parts:
        seconds, command = PARTS[name]
        words = shlex.split(command.replace("FOLDER", shlex.quote(str(options.folder))))
        start = time.monotonic()
        with (options.folder / f"{name}.log").open("w") as log:
            limited = ["timeout", "--kill-after=5", str(seconds), *words]
            environment = os.environ | of_root | on_gpu
            status = subprocess.run(limited, stdout=log, stderr=log, env=environment).returncode
        print(f"{name:16} status {status:3} {time.monotonic() - start:7.1f} s", flush=True)


if __name__ == "__main__":
    main()
