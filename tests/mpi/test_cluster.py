"""Collectives and training between several hosts with real links; links that break; ranks that die.

The hosts are namespaces on this machine, see ``tests/cluster``; that needs root.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import jobs
from tests.cluster import Network, unavailable
from tests.cluster_worker import TIMEOUT
from tests.mpi_scenarios import MODULES
from tests.scenarios import names, read

pytestmark = [
    pytest.mark.skipif(bool(unavailable()), reason=unavailable() or ""),
    pytest.mark.full,
]
NAMES = [name for module in MODULES for name in names(module, "mpi_scenarios", over="mpi", ranks=4)]
WORKER = jobs.TESTS / "cluster_worker.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "mpi"),
    [(2, 2, "openmpi"), (4, 1, "mpich")],
)
def test_all_scenarios_between_hosts(tmp_path, hosts, ranks_per_host, mpi):
    if mpi == "mpich" and (problem := jobs.mpich_missing()):
        pytest.skip(problem)
    with Network(hosts) as network:
        command = [sys.executable, "-m", "tests.mpi_scenarios", str(tmp_path), *MODULES]
        network.run(command, ranks_per_host, timeout=200, mpi=mpi)
    for rank in range(hosts * ranks_per_host):
        problems = {name: p for name, p in read(tmp_path, rank, NAMES).items() if p}
        assert not problems, f"rank {rank}: {problems}"


def started(network, folder):
    """A job that trains, once all its ranks do."""
    start, env = network.job([sys.executable, str(WORKER), str(folder)])
    job = network.start(start, **env)
    ready = [folder / f"{rank}.ready" for rank in range(len(network.hosts))]
    end = time.monotonic() + 60
    while not all(file.exists() for file in ready):
        assert job.poll() is None, job.stdout.read()
        assert time.monotonic() < end, "training did not begin"
        time.sleep(0.05)
    return job


@pytest.mark.timeout(150)
@pytest.mark.parametrize("hosts", [2, 4])
def test_a_cut_link_is_an_error_on_every_rank(tmp_path, hosts):
    with Network(hosts) as network:
        started(network, tmp_path)
        network.cut(2)
        cut = time.time()
        errors = [tmp_path / f"{rank}.error" for rank in range(hosts)]
        # Those that do not wait for the lost host themselves notice one round later.
        while not all(file.exists() for file in errors) and time.time() < cut + 4 * TIMEOUT:
            time.sleep(0.1)
        time.sleep(0.2)
        for rank, file in enumerate(errors):
            assert file.exists(), f"rank {rank} still waits"
            name, *message, when = file.read_text().splitlines()
            assert name == "CollectiveTimeout", message
            assert f"rank {rank} of {hosts}" in message[0]
            assert "waits for" in message[0]
            assert float(when) - cut < 2 * TIMEOUT
        lost = (tmp_path / "1.error").read_text()
        assert "HVD_COMPRESS_TIMEOUT" in lost


@pytest.mark.timeout(150)
@pytest.mark.parametrize("hosts", [2, 4])
def test_a_killed_rank_ends_the_job(tmp_path, hosts):
    with Network(hosts) as network:
        job = started(network, tmp_path)
        victim = [pid for pid in network.pids(2) if is_worker(pid)]
        assert victim
        for pid in victim:
            os.kill(pid, signal.SIGKILL)
        output, _ = job.communicate(timeout=6 * TIMEOUT)
        assert job.returncode
        assert "signal 9" in output or "Killed" in output or "CollectiveTimeout" in output, output


def is_worker(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return command[0].endswith(b"python3") or b"python" in command[0]


@pytest.mark.timeout(120)
def test_bytes_on_the_wire_are_those_that_are_counted(tmp_path):
    """Between four hosts: what the limiters count is the payload and a few percent of headers."""
    script = tmp_path / "traffic.py"
    script.write_text(
        "import json, sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from hvd_compress import mpi\n"
        "comm = mpi.Communicator()\n"
        "x = np.ones(4_000_000, np.float32)\n"
        "for _ in range(2):\n"
        "    mpi.allreduce(x, algorithm='ring', comm=comm, out=x)\n"
        "mpi.allreduce(x, algorithm='halving_doubling', comm=comm, out=x)\n"
        f"Path({str(tmp_path)!r}, str(comm.rank)).write_text(str(comm.bytes_sent))\n"
    )
    with Network(4) as network:
        before = network.traffic()
        network.run([sys.executable, str(script)], timeout=60)
        after = network.traffic()
    counted = [int((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert np.ptp(counted) < 10_000
    assert counted[0] >= 3 * 2 * 16_000_000 * 3 // 4
    for host in range(1, 5):
        on_wire = after[host].sent - before[host].sent
        assert counted[host - 1] < on_wire < 1.10 * counted[host - 1] + 500_000
