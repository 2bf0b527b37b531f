"""Starting: find MPI's files, and start an example as ``python example.py``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

_PREFIX = re.compile(rb"\[(?:\d+,)?\d+\]<std(?:out|err)>: ?")
# Set by horovodrun, Open MPI's mpirun, MPICH's and Slurm's starters.
_RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def find_mpi() -> None:
    """Open MPI's wheel finds its files under mpirun only; a process started alone needs a hint."""
    in_environment = (Path(sys.prefix) / "lib" / "libopen-rte.so.40").exists()
    if in_environment and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        os.environ.setdefault("OPAL_PREFIX", sys.prefix)


def under_horovodrun(ranks: int, controller: str) -> None:
    """Return if this process is one of Horovod's ranks; otherwise start them, wait, and exit."""
    if any(name in os.environ for name in _RANK_VARIABLES):
        return
    horovodrun = shutil.which(
        "horovodrun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if horovodrun is None:
        sys.exit("horovodrun not found: install Horovod with `hvd-compress install-horovod`")
    command = [horovodrun, f"--{controller}", "-np", str(ranks), "-H", f"localhost:{ranks}"]
    command += [sys.executable, *sys.argv]
    print("$", " ".join(command), flush=True)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    # horovodrun imports TensorFlow, which has much to say.
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    # More ranks than cores: who waits must not keep the core busy.
    environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        assert process.stdout is not None
        # horovodrun puts the rank before every piece of output, which tears progress bars apart.
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(_PREFIX.sub(b"", piece))
            sys.stdout.flush()
    sys.exit(process.returncode)
