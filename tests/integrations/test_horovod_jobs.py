"""Whole jobs: elastic training, sixteen ranks, a rank that dies."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from tests import jobs


@pytest.mark.timeout(300)
def test_elastic_training_outlives_a_worker(tmp_path):
    discover = tmp_path / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
    discover.chmod(0o755)
    log = tmp_path / "log"
    log.mkdir()
    command = ["horovodrun", "--gloo", "-np", "3", "--min-np", "2", "--max-np", "3"]
    command += ["--host-discovery-script", str(discover)]
    command += [sys.executable, str(jobs.TESTS / "elastic_worker.py"), str(log)]
    # The exit status of horovodrun counts the killed worker as a failure of its own.
    _, output = jobs.run(command, timeout=240, check=False, HOROVOD_ELASTIC="1")
    notes = [json.loads(line) for file in log.iterdir() for line in file.read_text().splitlines()]
    events = {
        event: [n for n in notes if n["event"] == event] for event in ("dies", "resumed", "done")
    }
    assert [n["size"] for n in events["dies"]] == [3], output
    assert [n["size"] for n in events["resumed"]] == [2, 2], output
    assert {n["step"] for n in events["resumed"]} == {5}
    assert sorted(n["rank"] for n in events["done"]) == [0, 1], output
    assert {n["step"] for n in events["done"]} == {12}


AFTER_THE_END = """
import horovod.torch as hvd
import torch
from hvd_compress.engines.named import Op
from torch_impl.engine import HorovodEngine

hvd.init()
engine = HorovodEngine(hvd, hvd.global_process_set)
assert engine.prefix.endswith(".of1"), engine.prefix
handle = engine._launch(Op("sum", "before", torch.ones(2)))
assert engine._wait(handle).tolist() == [1, 1]
hvd.shutdown()
for call in (lambda: engine._launch(Op("sum", "after", torch.ones(2))), lambda: engine._wait(-1)):
    hvd.poll = lambda handle: False  # as for what came into Horovod's queue too late
    try:
        call()
    except hvd.mpi_ops.HorovodInternalError as error:
        assert "hvd.init()" in str(error), error
    else:
        raise SystemExit("no error")
"""


def test_nothing_waits_for_horovod_after_its_thread_has_ended():
    jobs.run([sys.executable, "-c", AFTER_THE_END], timeout=60)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_sixteen_ranks(tmp_path, controller):
    """``horovodrun -np 16`` trains a small model with DGC for 20 steps."""
    command = [*jobs.launcher(16, controller), sys.executable, str(jobs.TESTS / "train_small.py")]
    _, output = jobs.run([*command, str(tmp_path), "20"], timeout=280)
    results = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert sorted(r["rank"] for r in results) == list(range(16)), output
    assert {r["size"] for r in results} == {16}
    assert {r["steps"] for r in results} == {20}
    assert len({r["digest"] for r in results}) == 1
    assert all(r["ratio"] > 3 for r in results)
    assert output.count("dgc: 20 steps, ") == 1  # the line at the end, from rank 0 alone


@pytest.mark.timeout(200)
@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_job(tmp_path, controller):
    """No hang and no success: the job ends with an error soon after a rank was killed."""
    command = [*jobs.launcher(3, controller), sys.executable, str(jobs.TESTS / "train_small.py")]
    started = time.monotonic()
    status, output = jobs.run([*command, str(tmp_path), "100000", "10"], timeout=120, check=False)
    assert status != 0, output
    assert "rank 1 is killed" in output
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - started < 120
    assert os.getpid()  # this process is not of the job's group
