"""Collectives over mpi4py: every scenario, in real jobs of several sizes, under both MPIs.

A job starts once per size and runs all scenarios of its modules; the tests read its results.
test_simulated.py runs the same scenarios, and others, at all numbers of ranks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest

from tests import jobs
from tests.mpi_scenarios import MODULES, WITHOUT_TORCH
from tests.scenarios import names, read


class Job(NamedTuple):
    launcher: str
    ranks: int
    modules: tuple[str, ...] = MODULES

    def __str__(self) -> str:
        return f"{self.launcher}-{self.ranks}"


JOBS = [
    Job("mpirun", 2),
    Job("mpirun", 5, WITHOUT_TORCH),
    Job("mpich", 3),
]
FULL = [
    *(Job("mpirun", ranks) for ranks in (1, 3, 8, 16)),
    *(Job("mpich", ranks) for ranks in (2, 5, 13)),
]


@functools.cache
def names_of(job: Job) -> list[str]:
    return [
        name
        for module in job.modules
        for name in names(module, "mpi_scenarios", over="mpi", ranks=job.ranks)
    ]


def cases(jobs: list[Job], *marks: pytest.MarkDecorator) -> list[Any]:
    return [
        pytest.param(job, name, id=f"{job}@{name}", marks=marks)
        for job in jobs
        for name in names_of(job)
    ]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """``results(job)[rank]``: a problem or ``None`` by scenario name."""

    @functools.cache
    def run(job: Job) -> list[dict[str, str | None]]:
        folder = tmp_path_factory.mktemp(str(job))
        command = jobs.launcher(job.ranks, job.launcher)
        command += [jobs.python(), "-m", "tests.mpi_scenarios", str(folder), *job.modules]
        try:
            jobs.run(command, timeout=180 + 30 * job.ranks, **jobs.variables(job.launcher))
        except jobs.JobError as error:
            (folder / "failure").write_text(str(error))
        return [read(folder, rank, names_of(job)) for rank in range(job.ranks)]

    return run


def test_every_scenario_applies_in_a_job():
    every = {name for module in MODULES for name in names(module, "mpi_scenarios", over=None)}
    assert every == {name for job in JOBS for name in names_of(job)}


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("job", "name"), [*cases(JOBS), *cases(FULL, pytest.mark.full)])
def test_scenario(results, job, name):
    if job.launcher == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    for rank, found in enumerate(results(job)):
        assert found[name] is None, f"rank {rank} of {job}: {found[name]}"
