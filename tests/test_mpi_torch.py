"""PyTorch over MPI without Horovod: the scenarios of the Horovod jobs and some more."""

from __future__ import annotations

import functools
import sys

import pytest

import jobs
from scenarios import read, scenarios

MODULES = ["training", "options", "numerics", "state", "over_mpi"]
JOBS = [("mpirun", 1), ("mpirun", 2), ("mpirun", 3), ("mpirun", 4), ("mpirun", 8)]
JOBS += [("mpich", 2), ("mpich", 4)]
NAMES = [f"{module}.{name}" for module in MODULES for name in scenarios(module, over="mpi")]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """``results(launcher, ranks)[rank]``: a problem or ``None`` by scenario name."""

    @functools.cache
    def run(launcher: str, ranks: int) -> list[dict[str, str | None]]:
        folder = tmp_path_factory.mktemp(f"{launcher}-{ranks}")
        command = jobs.launcher(ranks, launcher)
        command += [sys.executable, "-m", "scenarios", str(folder), *MODULES]
        variables = {"SCENARIOS_OVER": "mpi", **jobs.variables(launcher)}
        try:
            jobs.run(command, timeout=120 + 30 * ranks, **variables)
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
