"""Hypothesis draws the same examples in every run, and may take its time on a busy machine."""

import functools
import gc
import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
settings.load_profile("deterministic")

ROOT = Path(__file__).resolve().parent.parent

# Small arrays, many processes: threads that wait for each other cost ten times what they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")


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
    keeps one core busy, and the others idle."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # which puts what has the most tests first


def seconds_allowed(item):
    """The time-out of a test says how long it takes: a job gets some minutes, and a small test the
    default."""
    marker = item.get_closest_marker("timeout")
    limit = marker.args[0] if marker and marker.args else 0
    return limit, bool(item.get_closest_marker("jobs"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that read the results of one job go to one worker, which starts the job once: those
    whose names are equal up to an @.

    Half of the workers run jobs, the longest first, while the others run what needs one process:
    ranks of several jobs at once wait for each other's processors, and what takes ten seconds alone
    takes minutes.  What is left in the end, anybody runs.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByJob(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return nodeid.partition("@")[0]

        def _assign_work_unit(self, node):
            runs_jobs = node in self.nodes[: max(1, self.numnodes // 2)]
            own = (scope for scope in self.workqueue if starts_jobs(scope) == runs_jobs)
            if (chosen := next(own, None)) is not None:  # else whatever is left
                self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

    return ByJob(config, log)


def starts_jobs(nodeid):
    """Whether a test is of a module that starts several processes at once, by its name alone."""
    return _imports_jobs(nodeid.partition("::")[0])


@functools.cache
def _imports_jobs(path):
    file = ROOT / path
    return file.suffix == ".py" and bool(
        re.search(r"^from tests import jobs$", file.read_text(), re.M)
    )


# Programs that are started by tests, with arguments, and what runs inside jobs.
collect_ignore = [
    *("command_lines.py", "elastic_keras_worker.py", "elastic_worker.py", "train_small.py"),
    "horovods_own.py",
    *("parameter_server_job.py", "parameter_server_torch_job.py"),
]
collect_ignore_glob = ["scenarios/*", "mpi_scenarios/*"]
