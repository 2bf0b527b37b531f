"""Collectives over mpi4py: every scenario, in real jobs of several sizes, under both MPIs.

A job starts once per size and runs all scenarios of its modules; the tests read its results.
test_simulated.py runs the same scenarios, and others, at all numbers of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from tests import jobs
from tests.mpi_scenarios import MODULES, WITHOUT_TORCH
from tests.scenarios import names


@dataclasses.dataclass(frozen=True)
class Job:
    launcher: str
    ranks: int
    modules: tuple[str, ...] = MODULES

    def __str__(self) -> str:
        return f"{self.launcher}-{self.ranks}"

    @functools.cached_property
    def names(self) -> list[str]:
        return [
            name
            for module in self.modules
            for name in names(module, "mpi_scenarios", over="mpi", ranks=self.ranks)
        ]

    def run(self, folder: Path) -> None:
        command = jobs.launcher(self.ranks, self.launcher)
        command += [jobs.python(), "-m", "tests.mpi_scenarios", str(folder), *self.modules]
        jobs.run(command, timeout=180 + 30 * self.ranks, **jobs.variables(self.launcher))


JOBS = [
    Job("mpirun", 2),
    Job("mpirun", 5, WITHOUT_TORCH),
    Job("mpich", 3),
]
FULL = [
    *(Job("mpirun", ranks) for ranks in (1, 3, 8, 16)),
    *(Job("mpich", ranks) for ranks in (2, 5, 13)),
]


def test_every_scenario_applies_in_a_job():
    every = {name for module in MODULES for name in names(module, "mpi_scenarios", over=None)}
    assert every == {name for job in JOBS for name in job.names}


@pytest.mark.timeout(700)
@pytest.mark.parametrize(("job", "name"), [*jobs.cases(JOBS), *jobs.cases(FULL, pytest.mark.full)])
def test_scenario(passes, job, name):
    if job.launcher == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    passes(job, name)
