"""Collectives over mpi4py: every scenario, in real jobs of several sizes, under both MPIs.

A job starts once per size and runs all scenarios of its modules; the tests read its results.
"""

from __future__ import annotations

import functools
import sys

import pytest

import jobs
from mpi_scenarios import MODULES
from scenarios import names, read

SIZES = (1, 2, 3, 4, 5, 7, 8, 13, 16)
JOBS = [(launcher, ranks) for launcher in ("mpirun", "mpich") for ranks in SIZES]
NAMES = [f"{module}.{name}" for module in MODULES for name in names(module, "mpi_scenarios")]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """``results(launcher, ranks)[rank]``: a problem or ``None`` by scenario name."""

    @functools.cache
    def run(launcher: str, ranks: int) -> list[dict[str, str | None]]:
        folder = tmp_path_factory.mktemp(f"{launcher}-{ranks}")
        command = jobs.launcher(ranks, launcher)
        command += [sys.executable, "-m", "mpi_scenarios", str(folder), *MODULES]
        try:
            jobs.run(command, timeout=60 + 15 * ranks, **jobs.variables(launcher))
        except jobs.JobError as error:
            (folder / "failure").write_text(str(error))
        return [read(folder, rank, NAMES) for rank in range(ranks)]

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("launcher", "ranks"), JOBS)
def test_scenario(results, launcher, ranks, name):
    if launcher == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    for rank, found in enumerate(results(launcher, ranks)):
        assert found[name] is None, f"rank {rank} of {ranks}: {found[name]}"
