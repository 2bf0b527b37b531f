"""The network that other tests and benchmarks rely on: its limits, its counters, its hosts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import jobs
from tests.cluster import Network, unavailable

pytestmark = [pytest.mark.timeout(120), pytest.mark.full]

MEGA = 1_000_000
PORT = 7000

# The receiver's clock runs from its word that the sender may begin.
RECEIVE = f"""
import json, socket, sys, time
size = int(sys.argv[1])
connection, _ = socket.create_server(("", {PORT})).accept()
rates = []
for _ in range(3):
    start, left = time.monotonic(), size
    connection.sendall(b"!")
    while left:
        left -= len(connection.recv(min(left, {MEGA})))
    rates.append(8e-6 * size / (time.monotonic() - start))
print(json.dumps(rates))
"""
SEND = f"""
import socket, sys, time
for _ in range(200):
    try:
        connection = socket.create_connection((sys.argv[1], {PORT}))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
while connection.recv(1):
    connection.sendall(bytes(int(sys.argv[2])))
"""
RANK = f"""
import json, os, sys
from mpi4py import MPI
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
total = world.allreduce(world.rank)
other = int(sys.argv[2])
if world.rank == 0:
    world.Send(bytearray({5 * MEGA}), other)
if world.rank == other:
    world.Recv(bytearray({5 * MEGA}), 0)
found = [MPI.Get_processor_name(), node.size, total, os.environ["WORD"]]
found.append(MPI.Get_library_version()[:5])
with open(f"{{sys.argv[1]}}/{{world.rank}}", "w") as file:
    json.dump(found, file)
"""
STREAM = f"""
from mpi4py import MPI
data = bytearray({MEGA})
while True:
    if MPI.COMM_WORLD.rank == 0:
        MPI.COMM_WORLD.Send(data, 1)
    else:
        MPI.COMM_WORLD.Recv(data, 0)
"""


@pytest.fixture(scope="module", autouse=True)
def _possible():
    if reason := unavailable():
        pytest.skip(reason)


@pytest.fixture
def network():
    with Network(hosts=2) as network:
        yield network


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not so after {seconds} s"
        time.sleep(0.05)


def traces(name):
    """The parts of a network that the machine still has."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    folders = Path(tempfile.gettempdir()).glob(f"{name}*")
    return [space for space in spaces.stdout.split() if name in space] + list(folders)


# A busy machine may be slower than the link, and never faster.
def test_a_link_can_be_slowed():
    with Network(hosts=2) as network:
        network.slow(2, "20mbit")
        text = ["tc", "qdisc", "show", "dev", "eth0"]
        shown = [
            subprocess.run(network.on(host, text), capture_output=True, text=True).stdout
            for host in network.hosts
        ]
        assert "rate 1Gbit" in shown[0]
        assert "rate 20Mbit" in shown[1]


@pytest.mark.parametrize(
    ("rate", "size", "least", "most"),
    [("1gbit", 20 * MEGA, 700, 1000), ("200mbit", 4 * MEGA, 150, 200)],
)
def test_links_have_their_rate_and_count_their_bytes(rate, size, least, most):
    with Network(hosts=2, rate=rate) as network:
        before = network.traffic()
        receiver = network.start(network.on(2, python(RECEIVE, size)))
        jobs.run(network.on(1, python(SEND, network.address(2), size)), timeout=60)
        rates = json.loads(receiver.communicate(timeout=20)[0])
        after = network.traffic()
    assert least < max(rates) < most, rates
    sent = after[1].sent - before[1].sent
    received = after[2].received - before[2].received
    assert 3 * size < sent < 3.3 * size
    assert 3 * size < received < 3.3 * size
    assert after[1].received - before[1].received < 0.3 * size


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_ranks_share_memory_in_a_host_and_the_link_between(network, tmp_path, mpi):
    if mpi == "mpich" and (reason := jobs.mpich_missing()):
        pytest.skip(reason)
    for other, least, most in [(1, 0, MEGA), (2, 5 * MEGA, 6 * MEGA)]:
        before = network.traffic()[2].received
        network.run(python(RANK, tmp_path, other), 2, timeout=60, mpi=mpi, WORD="it is here")
        assert least < network.traffic()[2].received - before < most
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    library = {"openmpi": "Open ", "mpich": "MPICH"}[mpi]
    assert found == [[host, 2, 6, "it is here", library] for host in ("h1", "h1", "h2", "h2")]


def test_a_cut_link_stops_a_job_and_a_mended_one_lets_it_go_on():
    def received():
        return network.traffic()[2].received

    with Network(hosts=2, rate="100mbit") as network:
        start, env = network.job(python(STREAM))
        job = network.start(start, **env)
        wait_for(lambda: received() > 2 * MEGA)
        network.cut(2)
        before = received()
        time.sleep(0.5)
        assert received() == before
        assert job.poll() is None
        network.mend(2)
        wait_for(lambda: received() > before + 2 * MEGA)
    assert job.poll() is not None


def test_a_job_that_takes_too_long_leaves_no_process(network):
    asleep = network.start(network.on(2, ["sleep", "100"]))
    with pytest.raises(jobs.JobError, match="no end after 3 s"):
        network.run(python("import time; time.sleep(100)"), timeout=3)
    assert network.pids(1) == []
    assert network.pids(2) == [asleep.pid]  # of another job


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_nothing_is_left(error):
    def body():
        with Network(hosts=2) as network:
            started.append(network.start(network.on(2, ["sleep", "100"])))
            wait_for(lambda: network.pids(2))
            names.append(network.name)
            assert len(traces(network.name)) >= 4
            if error:
                raise error

    started, names = [], []
    if error:
        with pytest.raises(error):
            body()
    else:
        body()
    assert started[0].poll() == -signal.SIGKILL
    assert traces(names[0]) == []


def test_the_next_network_removes_what_a_killed_process_left():
    code = """
import os, signal
from tests import cluster
network = cluster.Network(hosts=1).__enter__()
asleep = network.start(network.on(1, ["sleep", "100"]))
while not network.pids(1):
    pass
print(network.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    _, output = jobs.run(python(code), timeout=20, check=False)
    name = output.strip()
    assert traces(name)
    with Network(hosts=1):
        assert traces(name) == []


def test_command_line():
    command = [sys.executable, str(jobs.TESTS / "cluster"), "--hosts", "2", "--timeout", "60"]
    script = "from mpi4py import MPI; MPI.COMM_WORLD.allreduce(1); print('so far'); exit(5)"
    status, output = jobs.run([*command, "--", *python(script)], timeout=80, check=False)
    assert status == 5, output
    assert output.count("so far") == 2
    assert "received" in output
    assert len([line for line in output.splitlines() if line.startswith(("h1 ", "h2 "))]) == 2
