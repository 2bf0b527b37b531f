"""PyTorch on real Horovod: every scenario, in real jobs of several sizes.

A job starts once per size and runs all scenarios of its modules; the tests read its results.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

import jobs
from scenarios import read, scenarios

MODULES = ["training", "options", "numerics", "state"]
JOBS = [("alone", 1), ("mpirun", 2), ("mpirun", 3), ("mpirun", 4), ("mpirun", 8), ("gloo", 2)]
NAMES = [f"{module}.{name}" for module in MODULES for name in scenarios(module)]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """``results(controller, ranks)[rank]``: a problem or ``None`` by scenario name."""

    @functools.cache
    def run(controller: str, ranks: int) -> list[dict[str, str | None]]:
        folder = tmp_path_factory.mktemp(f"{controller}-{ranks}")
        try:
            run_scenarios(folder, MODULES, controller, ranks)
        except jobs.JobError as error:
            (folder / "failure").write_text(str(error))
        return [read(folder, rank, NAMES) for rank in range(ranks)]

    return run


def run_scenarios(
    folder: Path, modules: list[str], controller: str, ranks: int, **env: str
) -> None:
    command = jobs.launcher(ranks, controller)
    command += [sys.executable, "-m", "scenarios", str(folder), *modules]
    if ranks == 3:
        # The order of additions of three numbers depends on where fusion puts them; here, runs
        # are compared bit by bit.
        env["HOROVOD_FUSION_THRESHOLD"] = "0"
    jobs.run(command, timeout=120 + 30 * ranks, **env)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("controller", "ranks"), JOBS)
def test_scenario(results, controller, ranks, name):
    for rank, found in enumerate(results(controller, ranks)):
        assert found[name] is None, f"rank {rank} of {ranks}: {found[name]}"


@pytest.mark.timeout(400)
def test_checkpoints_change_hands(tmp_path):
    """Saved on rank 0 of 4 and of 2; loaded by 4 and by 2."""
    for ranks in (4, 2):
        folder = tmp_path / f"save-{ranks}"
        folder.mkdir()
        run_scenarios(folder, ["checkpoint_save"], "mpirun", ranks, CHECKPOINTS=str(tmp_path))
    assert {file.name for file in tmp_path.glob("*.pt")} == {"2.pt", "4.pt"}
    for ranks in (4, 2, 3):
        folder = tmp_path / f"load-{ranks}"
        folder.mkdir()
        run_scenarios(folder, ["checkpoint_load"], "mpirun", ranks, CHECKPOINTS=str(tmp_path))
        for rank in range(ranks):
            [[_, problem]] = map(json.loads, (folder / str(rank)).read_text().splitlines())
            assert problem is None
