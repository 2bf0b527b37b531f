"""Processes that no starter started: Open MPI's files are found, and another MPI is left alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import venv
from pathlib import Path

import mpi4py
import pytest

from hvd_compress.integrations.launch import find_mpi

START_UP = Path(__file__).resolve().parents[2] / "hvd_compress_open_mpi.pth"
VARIABLES = ("OPAL_PREFIX", "OMPI_COMM_WORLD_SIZE", "MPI4PY_LIBMPI")


def python_starts():
    """What ``site`` does with the file: lines that begin with "import" are executed."""
    _, line = START_UP.read_text().splitlines()
    assert line.startswith("import ")
    exec(line)


@pytest.mark.parametrize("find", [find_mpi, python_starts])
@pytest.mark.parametrize(
    ("in_environment", "prefix", "under_mpirun", "library"),
    list(itertools.product(*[[True, False]] * 3, [None, "own", "other"])),
)
def test_the_prefix_is_set_only_where_it_is_needed(
    tmp_path, monkeypatch, find, in_environment, prefix, under_mpirun, library
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # undone after the test, whatever happens to it
        monkeypatch.delenv(name)
    (tmp_path / "lib").mkdir()
    if in_environment:
        (tmp_path / "lib" / "libopen-rte.so.40").touch()
    if prefix:
        monkeypatch.setenv("OPAL_PREFIX", "/chosen")
    if under_mpirun:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    if library:
        folder = tmp_path if library == "own" else Path("/usr")
        monkeypatch.setenv("MPI4PY_LIBMPI", str(folder / "lib" / "libmpi.so"))
    find()
    needed = in_environment and not under_mpirun and library != "other"
    expected = "/chosen" if prefix else str(tmp_path) if needed else None
    assert os.environ.get("OPAL_PREFIX") == expected


def test_mpi4py_starts_alone_in_an_environment_with_the_start_up_file(tmp_path):
    venv.create(tmp_path, with_pip=False, symlinks=True)
    for folder in ("bin", "etc", "lib", "share"):
        (tmp_path / folder).mkdir(exist_ok=True)
        for entry in Path(sys.prefix, folder).iterdir():
            if not (tmp_path / folder / entry.name).exists():
                (tmp_path / folder / entry.name).symlink_to(entry)
    (site,) = tmp_path.glob("lib/python*/site-packages")
    (site / "mpi4py").symlink_to(Path(mpi4py.__file__).parent)
    command = [
        tmp_path / "bin" / "python",
        "-c",
        "from mpi4py import MPI; print(MPI.COMM_WORLD.size)",
    ]
    bare = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    assert subprocess.run(command, env=bare, capture_output=True).returncode != 0
    (site / START_UP.name).symlink_to(START_UP)
    done = subprocess.run(command, env=bare, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
