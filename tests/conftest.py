"""Hypothesis draws the same examples in every run, and may take its time on a busy machine."""

import contextlib
import functools
import gc
import os

import pytest
from hypothesis import settings

from tests import jobs
from tests.scenarios import read

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")

# CUDA builds of PyTorch bring Triton along and import it late; a process that has loaded
# TensorFlow's LLVM by then ends there.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

# Small arrays, many processes: threads that wait for each other cost ten times what they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Open MPI asks libfabric for networks in each start, which takes a second and finds none for ranks
# of one host.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run tests marked as full, too")


def pytest_collection_modifyitems(config, items):
    """``-m jobs``: the tests of modules that start several processes at once."""
    for item in items:
        if hasattr(getattr(item, "module", None), "jobs"):
            item.add_marker(pytest.mark.jobs)
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        items.sort(key=seconds_allowed, reverse=True)  # and otherwise in the order of the files


def pytest_collection_finish(session):
    """Modules and tests stay, so the collector need not look through them each time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    """On several workers, tests that may take long come first: a long one that is left for the end
    keeps one core busy, and the others idle.  Jobs of all of them are forks of the same
    processes."""
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        jobs.share()
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # which puts what has the most tests first


def seconds_allowed(item):
    """The time-out of a test says how long it takes: a job gets some minutes, and a small test the
    default."""
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker and marker.args else 0
    return limit, bool(item.get_closest_marker("jobs"))


@pytest.fixture(scope="session")
def passes(tmp_path_factory):
    """``passes(job, name)``: a scenario has no problem on any rank of its job, which starts once.

    A job has ``ranks``, the ``names`` of its scenarios, and ``run(folder)``.
    """

    @functools.cache
    def results(job):
        folder = tmp_path_factory.mktemp(str(job))
        try:
            job.run(folder)
        except jobs.JobError as error:
            (folder / "failure").write_text(str(error))
        return [read(folder, rank, job.names) for rank in range(job.ranks)]

    def check(job, name):
        for rank, found in enumerate(results(job)):
            assert found[name] is None, f"rank {rank} of {job}: {found[name]}"

    return check


#: files whose tests all read the results of one job
OF_ONE_JOB = {
    "tests/integrations/test_signatures.py",
    "tests/systems/servers/test_mpi.py",
    "tests/torch_impl/test_calls.py",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that read the results of one job go to one worker, which starts the job once: those
    whose names are equal up to an @, and those of some files."""
    from xdist.scheduler import LoadScopeScheduling

    class ByJob(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if file in OF_ONE_JOB else nodeid.partition("@")[0]

        def _reschedule(self, node):
            """A worker begins a test when it knows the next one, so one that replaces another needs
            two that have not been run: given less, it waits for ever, and all others for it."""
            super()._reschedule(node)
            while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

        def remove_node(self, node):
            """The test that a worker has died in is not tried again."""
            units = self.assigned_work[node].values()
            left = [(unit, test) for unit in units for test, done in unit.items() if not done]
            if left:
                unit, crashed = left[0]
                unit[crashed] = True
            super().remove_node(node)
            return crashed if left else None

    return ByJob(config, log)


# Programs that are started by tests, with arguments, and what runs inside jobs.
collect_ignore = [
    *(
        "calls_worker.py",
        "command_lines.py",
        "elastic_keras_worker.py",
        "elastic_worker.py",
        "train_small.py",
    ),
    "horovods_own.py",
    *("parameter_server_job.py", "parameter_server_torch_job.py"),
]
collect_ignore_glob = ["scenarios/*", "mpi_scenarios/*", "trainers/*"]
