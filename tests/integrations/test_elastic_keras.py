"""Keras in an elastic job whose workers come and go."""

from __future__ import annotations

import json

import pytest

from tests import jobs

#: the hosts of each stage.  One whose worker died is used no more: the next starts on another.
HOSTS = [
    "localhost:1",
    "localhost:1 127.0.0.1:1",
    "localhost:2 127.0.0.1:1",
    None,  # a worker dies
    "localhost:3",
]


@pytest.mark.full
@pytest.mark.timeout(500)
def test_workers_join_die_and_are_started_again(tmp_path):
    """From 1 to 2, 3, 2 and 3; residuals are kept, and new workers have none."""
    log = tmp_path / "log"
    log.mkdir()
    now, *after = files = [tmp_path / f"hosts-{stage}" for stage in range(len(HOSTS))]
    for file, hosts in zip(files, HOSTS, strict=True):
        if hosts:
            file.write_text(hosts.replace(" ", "\n") + "\n")
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {now}\n")
    discover.chmod(0o755)
    command = ["horovodrun", "--gloo", "-np", "1", "--min-np", "1", "--max-np", "3"]
    # With one host, Horovod wants to be told the interface.
    command += ["--network-interfaces", "lo", "--host-discovery-script", str(discover)]
    command += [jobs.python("tensorflow"), str(jobs.TESTS / "elastic_keras_worker.py")]
    command += map(str, [log, now, *after])
    # A new worker imports TensorFlow while the others wait for it; and after a death, one of those
    # left may wait as long.  The exit status counts the killed worker as a failure of its own.
    env = {"HOROVOD_ELASTIC": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}
    _, output = jobs.run(command, timeout=450, check=False, **env)
    notes = [json.loads(line) for file in log.iterdir() for line in file.read_text().splitlines()]
    starts = sorted((n["stage"], n["size"], n["had"]) for n in notes if n["event"] == "starts")
    # The number of workers of each stage, and of those that had a residual before.
    stages = [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 2, 2), (4, 3, 2)]
    assert starts == [stage for stage in stages for _ in range(stage[1])], output[-5000:]
    done = [n for n in notes if n["event"] == "done"]
    assert sorted(n["rank"] for n in done) == [0, 1, 2], output[-5000:]
    assert {n["exchanges"] for n in done} == {n["step"] for n in done}
    assert len({n["step"] for n in done}) == 1
