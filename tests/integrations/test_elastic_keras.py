"""Keras in an elastic job whose workers come and go."""

from __future__ import annotations

import json
import sys

import pytest

from tests import jobs

#: for each stage but the first: what the job consists of.  A host whose worker died is used no
#: more, so that the next one starts on another.
HOSTS = [["localhost:1", "127.0.0.1:1"], ["localhost:2", "127.0.0.1:1"], [], ["localhost:3"]]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("legacy", ["0", "1"], ids=["keras", "tf_keras"])
def test_workers_join_die_and_are_started_again(tmp_path, legacy):
    hosts, log = tmp_path / "hosts", tmp_path / "log"
    log.mkdir()
    hosts.write_text("localhost:1\n")
    after = [tmp_path / f"hosts-{stage}" for stage in range(len(HOSTS))]
    for file, lines in zip(after, HOSTS, strict=True):
        file.write_text("\n".join(lines) + "\n")
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
    discover.chmod(0o755)
    command = ["horovodrun", "--gloo", "-np", "1", "--min-np", "1", "--max-np", "3"]
    command += ["--host-discovery-script", str(discover), sys.executable]
    command += [str(jobs.TESTS / "elastic_keras_worker.py"), *map(str, [log, hosts, *after])]
    # The exit status of horovodrun counts the killed worker as a failure of its own.
    _, output = jobs.run(
        command, timeout=340, check=False, HOROVOD_ELASTIC="1", TF_USE_LEGACY_KERAS=legacy
    )
    notes = [json.loads(line) for file in log.iterdir() for line in file.read_text().splitlines()]
    starts = sorted((n["stage"], n["size"], n["had"]) for n in notes if n["event"] == "starts")
    # The number of workers of each stage, and of those that had a residual before.
    stages = [(0, 1, 0), (1, 2, 1), (2, 3, 2), (3, 2, 2), (4, 3, 2)]
    assert starts == [stage for stage in stages for _ in range(stage[1])], output[-5000:]
    done = [n for n in notes if n["event"] == "done"]
    assert sorted(n["rank"] for n in done) == [0, 1, 2], output[-5000:]
    assert {n["exchanges"] for n in done} == {n["step"] for n in done}
    assert len({n["step"] for n in done}) == 1
