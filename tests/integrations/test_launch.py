"""Processes that no starter started: Open MPI's files are found, another MPI is left alone, and
children are told nothing."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvd_compress.launch import finding_mpi
from tests import jobs

VARIABLES = ("OPAL_PREFIX", "OMPI_COMM_WORLD_SIZE", "MPI4PY_LIBMPI")
LIBRARY = Path(sys.prefix, "lib", "libopen-rte.so.40")


def python(code):
    bare = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("in_environment", "prefix", "under_mpirun", "library"),
    list(itertools.product(*[[True, False]] * 3, [None, "own", "other"])),
)
def test_the_prefix_is_set_only_where_it_is_needed(
    tmp_path, monkeypatch, in_environment, prefix, under_mpirun, library
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "lib").mkdir()
    if in_environment:  # the one that other tests may have loaded
        (tmp_path / "lib" / LIBRARY.name).symlink_to(LIBRARY)
    if prefix:
        monkeypatch.setenv("OPAL_PREFIX", "/chosen")
    if under_mpirun:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    if library:
        folder = tmp_path if library == "own" else Path("/usr")
        monkeypatch.setenv("MPI4PY_LIBMPI", str(folder / "lib" / "libmpi.so"))
    before = dict(os.environ)
    needed = in_environment and not under_mpirun and library != "other"
    with finding_mpi():
        expected = "/chosen" if prefix else str(tmp_path) if needed else None
        assert os.environ.get("OPAL_PREFIX") == expected
    assert os.environ == before


ALONE = {
    "mpi": "import hvd_compress.mpi\nfrom mpi4py import MPI\nsize = MPI.COMM_WORLD.size",
    "torch": "import horovod.torch as hvd, hvd_compress.torch\nhvd.init(); size = hvd.size()",
    "tensorflow": "import hvd_compress.tensorflow as hvd\nhvd.init(); size = hvd.size()",
}
AND_ITS_CHILD = """
import subprocess, sys
child = [sys.executable, "-c", "import os; print('OPAL_PREFIX' in os.environ)"]
print(size, subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip())
"""


@pytest.mark.parametrize("over", ALONE)
def test_a_process_alone_starts_mpi_and_tells_its_children_nothing(over):
    done = python(ALONE[over] + AND_ITS_CHILD)
    assert (done.returncode, done.stdout) == (0, "1 False\n"), done.stderr


def test_another_open_mpi_that_is_loaded_is_left_alone(tmp_path):
    """Horovod may have been built with the cluster's."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / LIBRARY.name).touch()
    code = f"""
import os, sys
import hvd_compress.mpi  # loads that of {sys.prefix}
from hvd_compress.launch import finding_mpi
from tests import jobs
sys.prefix = {str(tmp_path)!r}
with finding_mpi():
    print(os.environ.get("OPAL_PREFIX"))
"""
    done = python(code)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.parametrize("start", ["setsid sleep 200", "env -i setsid sleep 90"])
def test_nobody_waits_for_what_a_job_started_elsewhere(start, monkeypatch):
    """It has the streams of the job.  In a session of its own, as ranks of torchrun are, it ends
    with the job.  With other variables, which children of forked ranks have, it goes on."""
    monkeypatch.setattr(jobs, "PATIENCE", 1.0)
    begin = time.monotonic()
    with pytest.raises(jobs.JobError, match="no end after 1 s"):
        jobs.run(["sh", "-c", f"{start} & wait"], timeout=1)
    assert time.monotonic() - begin < 60
