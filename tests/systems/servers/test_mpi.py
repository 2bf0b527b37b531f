"""Parameter servers in real MPI jobs, with workers that are slow, leave, hang or die."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests import jobs
from tests.systems.servers import STEPS, TIMEOUT

pytestmark = [pytest.mark.jobs, pytest.mark.timeout(120)]


class Job:
    """The outcome of a case: ``found[rank]``."""

    def __init__(self, folder: Path, output: str = "", status: int = 0, seconds: float = 0) -> None:
        self.output, self.status, self.seconds = output, status, seconds
        self.found: dict[int, Any] = {
            int(file.name): json.loads(file.read_text())
            for file in folder.iterdir()
            if file.is_file() and not file.suffix
        }

    @property
    def stats(self) -> dict[str, Any]:
        """The numbers of the server, the same on all ranks."""
        every = [found["stats"] for found in self.found.values()]
        assert all(each == every[0] for each in every)
        return every[0]

    def assert_equal(self, ranks: set[int]) -> None:
        assert self.found.keys() == ranks, self.output
        first, *others = (found["parameters"] for found in self.found.values())
        assert all(other == first for other in others)


def run(case: str, folder: Path, *options: str, ranks: int = 4, check: bool = False) -> Job:
    command = jobs.launcher(ranks, "mpirun")
    command[1:1] = options
    command += [jobs.python(), str(jobs.TESTS / "parameter_server_job.py"), case, str(folder)]
    start = time.monotonic()
    status, output = jobs.run(command, timeout=90, check=check)
    return Job(folder, output, status, time.monotonic() - start)


@pytest.fixture(scope="module")
def well(tmp_path_factory):
    """``well(case)``: what came of a case in which nobody fails; all of them are in one job."""
    folder = tmp_path_factory.mktemp("well")
    run("well", folder, check=True)
    return lambda case: Job(folder / case)


@pytest.mark.parametrize("case", ["sync", "sync-topk"])
def test_synchronous_has_the_bits_of_the_simulation(case, well):
    job = well(case)
    job.assert_equal({0, 1, 2, 3})
    assert job.stats["pushes"] == 3 * STEPS
    assert job.stats["staleness"] == {"0": 3 * STEPS}
    sent = sum(found["bytes_sent"] for found in job.found.values())
    assert sent == job.stats["bytes_up"]


def test_backup_workers(well):
    job = well("backup")
    job.assert_equal({0, 1, 2, 3})
    assert job.stats["dropped"]["0"] >= 1, "the slow one was late"
    assert job.stats["pushes"] == 3 * STEPS
    used = sum(job.stats["staleness"].values())
    assert used + sum(job.stats["dropped"].values()) == 3 * STEPS


def test_asynchronous(well):
    job = well("async")
    job.assert_equal({0, 1, 2, 3})
    assert job.stats["updates"] == 3 * STEPS
    assert max(map(int, job.stats["staleness"])) >= 2, "the slow one comes after several"


def test_a_worker_with_fewer_batches(well):
    job = well("ends-early")
    job.assert_equal({0, 1, 2, 3})
    assert [job.found[rank]["steps"] for rank in (1, 2, 3)] == [STEPS, 3, STEPS]
    assert job.stats["updates"] == STEPS
    assert job.stats["failed"] == job.stats["lost"] == []


def test_a_worker_with_an_error_does_not_end_the_others(tmp_path):
    job = run("leaves", tmp_path)
    job.assert_equal({0, 1, 3})
    assert job.status != 0
    assert "an error of this worker alone" in job.output
    assert "worker 1 leaves, and waits for the others to end" in job.output
    assert [job.found[rank]["steps"] for rank in (1, 3)] == [STEPS, STEPS]
    assert job.stats["failed"] == [1]
    assert job.stats["updates"] == STEPS


def test_a_worker_that_hangs_does_not_end_the_others(tmp_path):
    job = run("stops", tmp_path)
    job.assert_equal({0, 1, 3})
    assert re.search(r"worker 1 has sent nothing for \d+\.\d s: the others go on", job.output)
    assert [job.found[rank]["steps"] for rank in (1, 3)] == [STEPS, STEPS]
    assert job.stats["lost"] == [1]
    assert job.stats["updates"] == STEPS
    assert job.seconds > TIMEOUT


def test_a_worker_that_is_killed_does_not_end_the_others(tmp_path):
    """With a launcher that allows it."""
    job = run("dies", tmp_path, "--enable-recovery")
    job.assert_equal({0, 1, 3})
    assert [job.found[rank]["steps"] for rank in (1, 3)] == [20, 20]
    assert job.stats["lost"] == [1]
    assert job.stats["updates"] == 2 * 20 + 2


def test_workers_that_end_outside_of_the_statement_are_given_up(tmp_path):
    """All of them: none is left that could wait for another."""
    job = run("forgets", tmp_path, ranks=3)
    job.assert_equal({0})
    assert job.status != 0
    assert re.search(r"worker 0 has ended its program outside of `with`", job.output)
    assert sorted(job.stats["lost"]) == [0, 1]
    assert job.stats["updates"] == 1


def test_a_worker_that_was_silent_comes_back(well):
    job = well("pauses")
    job.assert_equal({0, 1, 2, 3})
    assert job.stats["returned"] == [1]
    assert job.stats["dropped"] == {"1": 1}
    assert job.stats["lost"] == []
    assert job.found[2]["steps"] == 20


@pytest.mark.parametrize("case", ["all-pause", "short-time-out"])
def test_nobody_is_given_up_while_there_is_nobody_to_go_on(case, well):
    """In a pause of all that is longer than ``worker_timeout``; and time-outs of calls that are
    shorter than that."""
    job = well(case)
    job.assert_equal({0, 1, 2, 3})
    assert job.stats["pushes"] == 3 * STEPS
    assert job.stats["updates"] == STEPS
    assert job.stats["lost"] == job.stats["returned"] == []


@pytest.mark.parametrize("case", ["leaders", "leaders-of-groups"])
def test_fast_workers_take_more_steps(case, well):
    job = well(case)
    job.assert_equal({0, 1, 2, 3})
    assert [job.found[rank]["steps"] for rank in (1, 2, 3)] == [4, 40, 40]
    # A choice for every 12 steps of all, or 8 when one has left.
    # Of the groups (0, 1) and (2,) the second has nobody to lead, unless its worker leads all.
    assert (
        job.stats["updates"] in {"leaders": range(4, 11), "leaders-of-groups": range(4, 16)}[case]
    )
    assert job.stats["pushes"] == 84


def test_damage_ends_the_job_with_its_reason(tmp_path):
    job = run("damaged", tmp_path)
    assert job.status != 0
    assert "bad payload from worker 1: its checksum does not match" in job.found[0]["error"]


def test_a_server_that_hangs_is_named(tmp_path):
    job = run("server-hangs", tmp_path, ranks=3)
    assert job.status != 0
    for rank in (1, 2):
        assert "no sign of life from the parameter server on rank 0" in job.found[rank]["error"]
