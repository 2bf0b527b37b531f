"""Multi-process jobs with a time-out that ends every process of the job."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import forked

BIN = Path(sys.executable).parent
TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# Beside Open MPI, whose programs have the same names: see scripts/setup.py.
MPICH = Path(sys.prefix) / "mpich"
# Apart from the other packages, since torch imports it wherever it finds it, which ends a process
# that has imported TensorFlow.
TRITON = Path(sys.prefix) / "triton"


#: what most jobs of a framework import, beside this project
IMPORTED = {
    # The first optimizer imports Dynamo, which takes as long as all else.
    "torch": (
        *("torch", "torch._dynamo", "mpi4py", "tqdm"),
        *("scipy.stats", "sklearn.datasets", "matplotlib.pyplot"),
    ),
    "tensorflow": ("tensorflow", "keras", "mpi4py"),
}


#: seconds for the output of a job that was killed
PATIENCE = 10.0


class JobError(AssertionError):
    """The job ended badly or not at all; the message shows its last lines."""


def environment(**more: str) -> dict[str, str]:
    return os.environ | settings(**more)


def settings(**more: str) -> dict[str, str]:
    """The variables that jobs have beyond those of this process, or with other values."""
    return {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        # Unbuffered, a traceback is many writes, and launchers mix those of several ranks.
        "PYTHONUNBUFFERED": "",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        # Tests run more ranks than there are cores, and containers run as root.
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **more,
    }


def launcher(ranks: int, controller: str) -> list[str]:
    """The command that starts ``ranks`` copies of what follows it."""
    if controller == "alone":
        return []
    if controller == "mpirun":
        return ["mpirun", "--oversubscribe", "--bind-to", "none", "--tag-output", "-np", str(ranks)]
    if controller == "mpich":
        return [str(MPICH / "bin" / "mpiexec"), "-prepend-rank", "-n", str(ranks)]
    return [*horovodrun(), f"--{controller}", "-np", str(ranks), "-H", f"localhost:{ranks}"]


def horovodrun() -> list[str]:
    """Horovod's launcher, which imports TensorFlow to see what Horovod was built for."""
    return [python("tensorflow"), str(BIN / "horovodrun")]


def torchrun(ranks: int) -> list[str]:
    """The command that starts ``ranks`` copies of what follows it by torchrun."""
    command = [python(), "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", str(ranks)]


def variables(controller: str) -> dict[str, str]:
    """The variables that ``run`` needs beside ``launcher``: the library for mpi4py, if it is not
    Open MPI's."""
    if controller == "mpich":
        return {"MPI4PY_LIBMPI": str(MPICH / "lib" / "libmpi.so.12")}
    return {}


def python(framework: str = "torch") -> str:
    """The Python of jobs, which starts with the packages of ``framework`` imported: forked.py."""
    if not hasattr(os, "pidfd_open"):  # Linux has it
        return sys.executable
    return os.environ.get(_SHARED + framework) or _forked(framework)


#: how variables begin by which workers know what all of them share
_SHARED = "HVD_COMPRESS_TESTS_"
#: the variable by which the processes of a job are known
_JOB = "HVD_COMPRESS_TESTS_JOB"


def share() -> None:
    """Let processes that this one starts use its Pythons, so that packages are imported once."""
    shared = {framework: python(framework) for framework in IMPORTED}
    shared["waits"] = sleeping_waits().get("LD_PRELOAD", "")
    os.environ.update({_SHARED + name: value for name, value in shared.items()})


@functools.cache
def _forked(framework: str) -> str:
    return forked.python(IMPORTED[framework], environment(**sleeping_waits()))


def mpich_missing() -> str | None:
    """Why jobs cannot run under MPICH, with the command that helps, or None if they can."""
    if (MPICH / "bin" / "mpiexec").exists():
        return None
    command = f"pip install --no-deps --ignore-installed --prefix {MPICH} mpich"
    return f"MPICH is not installed: make setup, or {command}"


def triton_missing() -> str | None:
    """Why there is no Triton, with the command that helps, or None if there is one."""
    if TRITON.exists() or importlib.util.find_spec("triton"):
        return None
    return f"Triton is not installed: make setup, or pip install --no-deps --target {TRITON} triton"


def package_missing(name: str, command: str) -> str | None:
    """Why nothing can be tested with a package, with the command that helps, or None if it is
    there."""
    if importlib.util.find_spec(name):
        return None
    return f"{name} is not installed, and nothing was tested with it: {command}"


def run(
    command: Sequence[str], timeout: float, *, check: bool = True, **env: str
) -> tuple[int, str]:
    """``(exit status, output)`` of a command; every process of it is gone afterwards.

    Raises:
        JobError: it took longer than ``timeout`` seconds, or failed and ``check`` is true.
    """
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    with subprocess.Popen(
        list(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment(**sleeping_waits(), **env, **{_JOB: mark}),
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            _end(process, mark)
            output = ""
            with contextlib.suppress(subprocess.TimeoutExpired):  # who has no mark may hold it open
                output, _ = process.communicate(timeout=PATIENCE)
            raise JobError(f"no end after {timeout} s: {command}\n{_tail(output)}") from None
        finally:
            _end(process, mark)
    if check and process.returncode:
        raise JobError(f"exit status {process.returncode}: {command}\n{_tail(output)}")
    return process.returncode, output


def _end(process: subprocess.Popen[str], mark: str) -> None:
    """Kill a command and all that has its mark: launchers start ranks in sessions of their own,
    and output ends when the last of them does."""
    kill(process)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{_JOB}={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                os.kill(int(folder.name), signal.SIGKILL)


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a command that was started in a session of its own, with all it started there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


@functools.cache
def sleeping_waits() -> dict[str, str]:
    """The variables that let waiting ranks sleep: a third of the time of jobs on few cores is spent
    in waits, above all those of Horovod's thread, which waits for the other ranks in every cycle.
    Without a C compiler, jobs take longer."""
    if not (sys.platform == "linux" and shutil.which("cc")):
        return {}
    if os.environ.get("LD_PRELOAD"):
        return {}  # a sanitizer's library, which must be the first
    if library := os.environ.get(_SHARED + "waits"):
        return {"LD_PRELOAD": library}
    folder = tempfile.mkdtemp(prefix="hvd_compress-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = f"{folder}/waiting.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, str(TESTS / "waiting.c")]
    if subprocess.run(command, capture_output=True, timeout=60).returncode:
        return {}
    return {"LD_PRELOAD": library}


class Torchrun(NamedTuple):
    """A job of scenarios that torchrun starts, as the fixture ``passes`` takes it.

    Attributes:
        program, more: what stands before the folder of results, and after it.
    """

    label: str
    ranks: int
    names: tuple[str, ...]
    program: tuple[str, ...]
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.label}-{self.ranks}"

    def run(self, folder: Path) -> None:
        run([*torchrun(self.ranks), *self.program, str(folder), *self.more], timeout=240)


def worker(name: str, ranks: int, names: Iterable[str]) -> Torchrun:
    """The scenarios of a program in this folder."""
    return Torchrun(name, ranks, tuple(names), (str(TESTS / f"{name}.py"),))


def cases(jobs: Iterable[Any], *marks: pytest.MarkDecorator) -> list[Any]:
    """Parameters of a test for each scenario of some jobs, which one worker runs."""
    return [
        pytest.param(job, name, id=f"{job}@{name}", marks=marks)
        for job in jobs
        for name in job.names
    ]


def _tail(output: str, lines: int = 60) -> str:
    return "\n".join(output.splitlines()[-lines:])
