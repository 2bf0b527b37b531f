"""Whole jobs: elastic training, sixteen ranks, a rank that dies."""

from __future__ import annotations

import json
import os
import re
import time
import types
from unittest import mock

import pytest

from hvd_compress.torch.engine import HorovodEngine
from tests import jobs

#: workers that join take long to start where there are few cores; those who are left by one that
#: dies may wait as long before they meet anew
_SLOW = {"HOROVOD_ELASTIC": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}


def elastic(folder, worker, *arguments, hosts, framework="torch", most=3, timeout=240):
    """Run a worker on the hosts that stand in a file of the folder; what its processes noted."""
    (folder / "hosts").write_text(hosts + "\n")
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discover.chmod(0o755)
    count = sum(int(line.split(":")[1]) for line in hosts.splitlines())
    command = [*jobs.horovodrun(), "--gloo", "-np", str(count)]
    command += ["--min-np", "1", "--max-np", str(most)]
    command += ["--network-interfaces", "lo", "--host-discovery-script", str(discover)]
    command += ["--blacklist-cooldown-range", "1", "2"]
    command += [jobs.python(framework), str(jobs.TESTS / worker), str(folder), *arguments]
    # The exit status of horovodrun counts a killed worker as a failure of its own.
    _, output = jobs.run(command, timeout=timeout, check=False, **_SLOW)
    logs = [file.read_text() for file in folder.iterdir() if file.name.isdecimal()]
    return [json.loads(line) for log in logs for line in log.splitlines()], output


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "method",
    ["dgc:density=0.05", "diloco", pytest.param("auto:steps=1", marks=pytest.mark.full)],
)
def test_workers_join_an_elastic_job_die_and_are_started_again(tmp_path, method):
    """From one to two and three, and from three to two and three."""
    notes, output = elastic(tmp_path, "elastic_worker.py", method, hosts="localhost:1", timeout=350)
    meetings = [n for n in notes if n["event"] == "meets"]
    assert {1, 2, 3} <= {n["size"] for n in meetings}, output
    assert (tmp_path / "dead").exists(), output
    done = [n for n in notes if n["event"] == "done"]
    assert sorted(n["rank"] for n in done) == [0, 1, 2], output
    assert len({n["step"] for n in done}) == 1
    again = [n for n in meetings if n["phase"] == 3 and n["size"] == 3 and n["rank"] == 2]
    assert again, output


#: the hosts of each stage.  One whose worker died is not used for a while: the next starts on
#: another.
HOSTS = [
    "localhost:1",
    "localhost:1\n127.0.0.1:1",
    "localhost:2\n127.0.0.1:1",
    None,  # a worker dies
    "localhost:3",
]


@pytest.mark.full
@pytest.mark.timeout(500)
def test_workers_of_keras_join_die_and_are_started_again(tmp_path):
    """From 1 to 2, 3, 2 and 3; residuals are kept, and new workers have none."""
    files = [tmp_path / f"hosts-{stage}" for stage in range(1, len(HOSTS))]
    for file, hosts in zip(files, HOSTS[1:], strict=True):
        if hosts:
            file.write_text(hosts + "\n")
    worker = "elastic_keras_worker.py", *map(str, files)
    notes, output = elastic(tmp_path, *worker, hosts=HOSTS[0], framework="tensorflow", timeout=450)
    starts = sorted((n["stage"], n["size"], n["had"]) for n in notes if n["event"] == "starts")
    # The number of workers of each stage, and of those that had a residual before.
    stages = [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 2, 2), (4, 3, 2)]
    assert starts == [stage for stage in stages for _ in range(stage[1])], output[-5000:]
    done = [n for n in notes if n["event"] == "done"]
    assert sorted(n["rank"] for n in done) == [0, 1, 2], output[-5000:]
    assert {n["exchanges"] for n in done} == {n["step"] for n in done}
    assert len({n["step"] for n in done}) == 1


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
    jobs.run([jobs.python(), "-c", AFTER_THE_END], timeout=60)


#: rank 0 goes on, and all others end
ALONE = """
import sys

import horovod.torch as hvd
import torch
from hvd_compress.engines.named import Op
from torch_impl.engine import HorovodEngine

hvd.init()
engine = HorovodEngine(hvd, hvd.global_process_set)
engine._wait(engine._launch(Op("sum", "together", torch.ones(3))))
if hvd.rank():
    sys.exit()
"""

AFTER_THE_END_OF_ANOTHER = """
try:
    engine._wait(engine._launch(Op("sum", "alone", torch.ones(3))))
except hvd.mpi_ops.HorovodInternalError:
    hvd.poll = lambda handle: False  # as for what came into Horovod's queue too late
    try:
        engine._wait(-1)
    except hvd.mpi_ops.HorovodInternalError as error:
        assert "no longer runs" in str(error), error
        print("too late")
"""


def test_nothing_waits_for_horovod_after_another_rank_has_ended():
    """Its thread ends on all ranks, and the global process set keeps its size."""
    command = [*jobs.launcher(2, "mpirun"), jobs.python(), "-c", ALONE + AFTER_THE_END_OF_ANOTHER]
    _, output = jobs.run(command, timeout=60, check=False)
    assert "too late" in output, output


def test_a_rank_that_is_lost_is_the_likely_cause():
    """The errors in which Horovod speaks of connections; of all others it says itself what is
    wrong."""
    HorovodInternalError = type("HorovodInternalError", (RuntimeError,), {})
    ops = types.SimpleNamespace(HorovodInternalError=HorovodInternalError)
    process_set = types.SimpleNamespace(size=lambda: 2)
    for message, words in (
        ("Horovod has been shut down.", "Horovod has been .*ended or is stopped.*GLOO_TIMEOUT"),
        ("[gloo/transport/tcp/pair.cc:589] Read timeout", "pair.*ended or is stopped"),
        ("Mismatched data types", "Mismatched data types$"),
    ):
        synchronize = mock.Mock(side_effect=HorovodInternalError(message))
        hvd = types.SimpleNamespace(mpi_ops=ops, poll=lambda handle: True, synchronize=synchronize)
        with pytest.raises(HorovodInternalError, match=re.compile(words, re.DOTALL)):
            HorovodEngine(hvd, process_set)._wait(0)


ANOTHER_ORDER = """
import os
import signal
import sys

import hvd_compress.torch as hvd
import torch

hvd.init()
torch.manual_seed(0)
models = [torch.nn.Linear(64, 64) for _ in range(2)]
optimizers = [
    hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.PowerSGD(rank=1)
    )
    for model in models
]
for step in range(3):
    for model in models:
        model(torch.ones(1, 64)).sum().backward()
    if step == 2 and hvd.rank():
        optimizers.reverse()
        if sys.argv[1] == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("way", ["in another order", "stopped"])
def test_a_wait_over_horovod_has_an_end(way):
    """Horovod itself would wait for ever; with dynamic process sets it does so with its locks."""
    command = [*jobs.launcher(2, "mpirun"), jobs.python(), "-c", ANOTHER_ORDER, way]
    limits = {"HVD_COMPRESS_TIMEOUT": "2", "HOROVOD_DYNAMIC_PROCESS_SETS": "0"}
    status, output = jobs.run(command, timeout=60, check=False, **limits)
    assert status != 0
    assert "CollectiveTimeout: rank 0 of 2: 'hvd_compress." in output, output


UNEVEN = """
import hvd_compress.torch as hvd
import torch

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.TopK(density=0.5)
)
for _ in range(3 if hvd.rank() else 6):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def test_a_rank_with_fewer_batches_ends_the_others_with_a_word():
    """Horovod's own, or ours: which it is depends on when the first has ended."""
    command = [*jobs.launcher(2, "mpirun"), jobs.python(), "-c", UNEVEN]
    status, output = jobs.run(command, timeout=100, check=False)
    assert status != 0
    assert "fewer batches" in output or "one of the ranks finished execution" in output, output


SUBMITS_UNTIL_THE_END = """
import itertools

for number in itertools.count():
    kind = ("sum", "max", "gather", "alltoall")[number % 4]
    splits = torch.tensor([2, 2], dtype=torch.int32) if kind == "alltoall" else None
    engine._launch(Op(kind, str(number), torch.ones(5)[1:], splits))
"""


@pytest.mark.parametrize("controller", ["mpirun", pytest.param("gloo", marks=pytest.mark.full)])
def test_a_rank_that_submits_while_horovod_ends_does_not_wait_for_ever(controller):
    """Horovod's thread drops what is pending, with its table of process sets in hand."""
    command = [*jobs.launcher(2, controller), jobs.python(), "-c", ALONE + SUBMITS_UNTIL_THE_END]
    status, output = jobs.run(command, timeout=100, check=False)
    assert status != 0
    assert "HorovodInternalError" in output, output


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_sixteen_ranks(tmp_path, controller):
    """``horovodrun -np 16`` trains a small model with DGC for 20 steps."""
    command = [*jobs.launcher(16, controller), jobs.python(), str(jobs.TESTS / "train_small.py")]
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
    command = [*jobs.launcher(3, controller), jobs.python(), str(jobs.TESTS / "train_small.py")]
    started = time.monotonic()
    status, output = jobs.run([*command, str(tmp_path), "100000", "10"], timeout=120, check=False)
    assert status != 0, output
    assert "rank 1 is killed" in output
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - started < 120
    assert os.getpid()  # this process is not of the job's group
