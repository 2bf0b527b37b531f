"""Collectives over mpi4py: every scenario, in real jobs of several sizes, under both MPIs.

A job starts once per size and runs all scenarios of its modules; the tests read its results.
test_mpi_simulated.py runs the same scenarios, and others, at all numbers of ranks.
"""

from __future__ import annotations

import functools
import sys

import pytest

import jobs
from mpi_scenarios import MODULES
from scenarios import names, read

JOBS = [("mpirun", 2), ("mpirun", 3), ("mpirun", 5), ("mpich", 3)]
FULL = [("mpirun", 1), ("mpirun", 8), ("mpirun", 16), ("mpich", 2), ("mpich", 5), ("mpich", 13)]
NAMES = [f"{module}.{name}" for module in MODULES for name in names(module, "mpi_scenarios")]


def one_worker(launcher: str, ranks: int) -> pytest.MarkDecorator:
    """Tests that read the results of one job run in the process that started it."""
    return pytest.mark.xdist_group(f"{launcher}-{ranks}")


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
@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        *(pytest.param(*job, marks=one_worker(*job)) for job in JOBS),
        *(pytest.param(*job, marks=[one_worker(*job), pytest.mark.full]) for job in FULL),
    ],
)
def test_scenario(results, launcher, ranks, name):
    if launcher == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    for rank, found in enumerate(results(launcher, ranks)):
        assert found[name] is None, f"rank {rank} of {ranks}: {found[name]}"
