"""Jobs that go wrong end, soon, and say why: under both MPIs."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import jobs
from tests.mpi_failures import CULPRIT, TIMEOUT

RANKS = 3
OTHERS = [rank for rank in range(RANKS) if rank != CULPRIT]
#: beyond the time-out, on a busy machine
SLACK = 20


class Job:
    """The outcome of a case: ``found[rank]``, ``(called, error, message, seconds)`` one by one."""

    def __init__(self, launcher: str, case: str, folder: Path) -> None:
        self.launcher, (self.case, *options) = launcher, case.split()
        command = jobs.launcher(RANKS, launcher)
        command[1:1] = options
        command += [jobs.python(), jobs.TESTS / "mpi_failures.py", self.case, folder]
        start = time.monotonic()
        self.status, self.output = jobs.run(
            list(map(str, command)), timeout=90, check=False, **jobs.variables(launcher)
        )
        self.seconds = time.monotonic() - start
        self.found = [
            [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            for log in (folder / str(rank) for rank in range(RANKS))
        ]
        ended = [log.stat().st_mtime for log in folder.iterdir()]
        self.seconds_to_end = time.time() - max(ended, default=0)


def arrays_of_different_size_are_an_error_on_every_rank(job):
    assert job.status != 0
    names = [line[0] for line in job.found[0]]
    assert len(names) == 8, job.output
    for rank in range(RANKS):
        assert [line[0] for line in job.found[rank]] == names, job.output
        for name, error, message, seconds in job.found[rank]:
            assert error in ("MismatchError", "CollectiveTimeout"), (name, message)
            assert seconds < TIMEOUT / 2 + SLACK
            assert re.search(r"ranks? \d", message), (name, message)
            assert re.search(r"reduce|halving|doubling|folding|broadcast|sums|results", message)
            if error == "CollectiveTimeout":
                assert "other sizes" in message
                assert "ring" not in name or re.search(r"round [12] of 2", message), message


def a_rank_that_makes_no_communicator_is_waited_for_no_longer_than_others(job):
    assert job.status != 0
    for rank in OTHERS:
        (_, *first), (_, *engine) = job.found[rank]
        for error, message, seconds in (first, engine):
            assert error == "CollectiveTimeout"
            assert TIMEOUT <= seconds < TIMEOUT + SLACK
            assert "HVD_COMPRESS_TIMEOUT" in message
        assert "in Communicator(); waits for the other ranks (comparing options)" in first[1]
        assert "in a new optimizer, reducer or engine; waits for" in engine[1]
        assert f"a message from rank {CULPRIT} " in engine[1]


def ranks_that_begin_otherwise_all_say_so(job):
    _all_show(job, "rank 0, 2: init()", "rank 1: allreduce(")


def a_rank_that_removes_a_set_alone_is_an_error_on_all(job):
    _all_show(job, "rank 0, 2: allgather", "rank 1: remove_process_set([0, 1])")


def _all_show(job, *calls):
    for rank in range(RANKS):
        ((_, error, message, seconds),) = job.found[rank]
        assert error == "MismatchError"
        assert all(call in message for call in calls), message
        assert seconds < SLACK


def a_rank_that_waits_elsewhere_says_where(job):
    for rank in range(RANKS):
        ((_, error, message, _),) = job.found[rank]
        assert error == "CollectiveTimeout"
        if rank == CULPRIT:
            assert "rank 0 waits in exchange of gradients" in message
        else:
            assert f"rank {CULPRIT} waits in allreduce(float64[3], sum, auto)" in message
        assert "fewer batches" in message
        assert "drop_last" in message


def a_rank_that_has_ended_is_waited_for_no_longer(job):
    """Long before the time-out, which is ten minutes here."""
    for rank in OTHERS:
        ((_, error, message, seconds),) = job.found[rank]
        assert error == "MismatchError", message
        assert f"rank {CULPRIT} has ended its program" in message
        assert "one had fewer batches" in message
        assert "drop_last" in message
        assert seconds < SLACK


def a_rank_that_is_needed_no_more_may_end(job):
    assert job.status == 0, job.output


def a_rank_that_makes_no_call_is_named(job):
    assert job.status != 0
    assert job.seconds_to_end < SLACK
    assert f"nothing has moved for {TIMEOUT / 10:g} s" in job.output  # the warning before
    assert "CollectiveTimeout: rank" in job.output
    named = 0
    for rank in OTHERS:
        ((_, error, message, seconds),) = job.found[rank]
        assert error == "CollectiveTimeout"
        assert TIMEOUT <= seconds < TIMEOUT + SLACK
        assert f"rank {rank} of {RANKS} on " in message
        assert "HVD_COMPRESS_TIMEOUT" in message
        named += bool(re.search(rf"waits for (a message from )?rank {CULPRIT}\b", message))
    # In a ring one rank waits for its message, and the other perhaps for a message to leave;
    # elsewhere everyone hears from everyone.
    assert named >= (1 if job.case == "sleeps-unchecked" else len(OTHERS))


def neighbours_of_a_rank_that_takes_fewer_steps_name_it(job):
    for rank in OTHERS:
        ((_, error, message, seconds),) = job.found[rank]
        assert error == "CollectiveTimeout"
        assert TIMEOUT <= seconds < TIMEOUT + 2 * SLACK
        assert re.search(rf"rank {CULPRIT}\b", message)


def a_rank_that_is_killed_ends_the_job(job):
    assert job.status != 0
    if job.launcher == "mpirun":
        assert re.search(rf"process rank {CULPRIT} .*signal 9", job.output), job.output
    else:  # MPICH's launcher knows the process, not the rank
        assert re.search(r"PID \d+ RUNNING AT", job.output), job.output
        assert "signal 9" in job.output


def survivors_name_the_rank_that_was_killed(job):
    """If the launcher does not end the job, the time-out does."""
    assert job.seconds_to_end < SLACK
    messages = []
    for rank in OTHERS:
        ((_, error, message, _),) = job.found[rank]
        assert error == "CollectiveTimeout"
        messages.append(message)
    assert any(re.search(rf"waits .*rank {CULPRIT}\b", message) for message in messages), messages


def a_broken_communicator_fails_at_once(job):
    assert job.status != 0
    for rank in OTHERS:
        first, *later = job.found[rank]
        assert f"rank {CULPRIT}" in first[2]
        assert TIMEOUT <= first[3] < TIMEOUT + SLACK
        assert len(later) == 2
        for _, error, message, seconds in later:
            assert error == "CollectiveTimeout"
            assert "broken" in message
            assert first[2] in message  # and why
            assert seconds < TIMEOUT


def an_error_of_one_rank_ends_the_job(job):
    assert job.status != 0
    assert "an error of this rank alone" in job.output
    assert job.seconds < 60


def a_rank_ends_whatever_there_is_to_its_streams(job):
    assert job.status != 0
    assert "CollectiveTimeout: rank" in job.output
    assert job.seconds < 60


def messages_inside_a_node_name_ranks_of_the_whole(job):
    assert job.status != 0
    inside, across = (job.found[rank] for rank in OTHERS)
    assert "waits for a message from rank 1 (inside the node, reduce)" in inside[0][2]
    assert "waits for a message from rank 0 (across nodes, ring" in across[0][2]
    for lines in (inside, across):
        assert lines[0][1] == "CollectiveTimeout"
        assert "broken" in lines[1][2]


#: by case, with options of mpirun: those that take longest come first
HOLDS = {
    "sizes": arrays_of_different_size_are_an_error_on_every_rank,
    "sleeps-making": a_rank_that_makes_no_communicator_is_waited_for_no_longer_than_others,
    "ends-early": a_rank_that_has_ended_is_waited_for_no_longer,
    "needed-no-more": a_rank_that_is_needed_no_more_may_end,
    "sleeps": a_rank_that_makes_no_call_is_named,
    "sleeps-unchecked": a_rank_that_makes_no_call_is_named,
    "elsewhere": a_rank_that_waits_elsewhere_says_where,
    "removes": a_rank_that_removes_a_set_alone_is_an_error_on_all,
    "inits": ranks_that_begin_otherwise_all_say_so,
    "fewer-steps": neighbours_of_a_rank_that_takes_fewer_steps_name_it,
    "broken": a_broken_communicator_fails_at_once,
    "killed --enable-recovery": survivors_name_the_rank_that_was_killed,
    "node": messages_inside_a_node_name_ranks_of_the_whole,
    "killed": a_rank_that_is_killed_ends_the_job,
    "error": an_error_of_one_rank_ends_the_job,
    "error-before": an_error_of_one_rank_ends_the_job,
    "closed": a_rank_ends_whatever_there_is_to_its_streams,
}


def cases(launcher: str, *marks: pytest.MarkDecorator) -> list:
    return [
        pytest.param(launcher, case, marks=marks, id=f"{launcher}@{case.split()[0]}-{f.__name__}")
        for case, f in HOLDS.items()
        if launcher == "mpirun" or "--" not in case
    ]


CASES = [*cases("mpirun"), *cases("mpich", pytest.mark.full)]


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Each case's job, some of which run at once: most of their time they wait for a time-out."""
    jobs.python()
    with ThreadPoolExecutor(4) as pool:

        @functools.cache
        def start(launcher: str) -> dict[str, Future[Job]]:
            return {
                case: pool.submit(Job, launcher, case, tmp_path_factory.mktemp(launcher))
                for other, case in (param.values for param in CASES)
                if other == launcher
            }

        yield start


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("launcher", "case"), CASES)
def test_a_job_that_goes_wrong(started, launcher, case):
    if launcher == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    HOLDS[case](started(launcher)[case].result())


@pytest.mark.timeout(120)
def test_the_wrong_mpi_is_an_error(tmp_path):
    """Each process would be a world of its own, and train alone."""
    if problem := jobs.mpich_missing():
        pytest.skip(problem)
    program = "from hvd_compress.mpi import Communicator; Communicator()"
    command = [*jobs.launcher(2, "mpich"), sys.executable, "-c", program]
    status, output = jobs.run(command, timeout=60, check=False)  # mpi4py finds Open MPI
    assert status != 0
    assert "SetupError: 2 processes were started, and mpi4py sees only this one" in output
    assert "MPI4PY_LIBMPI" in output
