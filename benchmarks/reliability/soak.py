"""The campaign of soaking: every system in turn trains on the network of hosts, with checks.

After each job nothing may be left of it: no process, no socket, no shared memory, no file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tqdm import tqdm

from mpi_examples.all_systems import SYSTEMS, System
from tests.cluster import Network, unavailable

#: hosts, and ranks of each: in turn, each rank behind a link, and two that share memory
LAYOUTS = ((4, 1), (2, 2))
#: systems of a job, which a process has in turn
GROUP = 6
#: seconds that a job may need beyond its training, on a busy machine
SLACK = 500.0
#: and what is trained beyond the examples' table of systems; the last two, :mod:`.soaked` makes
SOAKED = {
    **SYSTEMS,
    "fp8": System("compression", "", "fp8"),
    "linear": System("compression", "", "linear"),
    "randomk": System("compression", "", "randomk:density=0.05"),
    "qsgd": System("compression", "", "qsgd"),
    "auto": System("compression", "", "auto"),
    "horovod": System("horovod", "", None),
    "ddp": System("ddp", "", None),
}
#: systems whose weights grow without end in so many steps, as docs/training/local-sgd.md says
DIVERGING = {"diloco+dgc"}
# The last line of a host shows what its ranks have left in shared memory.
_RANK = """"$0" "$@"
status=$?
ls /dev/shm > "$FOLDER/$OMPI_COMM_WORLD_RANK.shm"
exit $status"""


def run(options: argparse.Namespace) -> list[str]:
    """Run the campaign; return what should not have been."""
    if reason := unavailable():
        return [reason]
    chosen = options.only or SOAKED.keys() - DIVERGING
    names = [name for name in SOAKED if name in chosen]
    groups = [names[i : i + GROUP] for i in range(0, len(names), GROUP)]
    problems: list[str] = []
    end, overhead, left = time.monotonic() + 60 * options.minutes, 10.0, len(names)
    with contextlib.suppress(KeyboardInterrupt):  # what was done by then counts
        for i, group in enumerate(tqdm(groups, ncols=90)):
            begin = time.monotonic()
            free = end - begin - overhead * (len(groups) - i)
            seconds, (hosts, ranks) = max(5.0, free / left), LAYOUTS[i % len(LAYOUTS)]
            rows, wrong = job(group, hosts, ranks, seconds)
            overhead = time.monotonic() - begin - seconds * len(group)
            left -= len(group)
            problems += wrong
            tqdm.write("\n".join(f"{row}, {hosts} x {ranks}" for row in rows))
    return problems


def job(names: list[str], hosts: int, ranks: int, seconds: float) -> tuple[list[str], list[str]]:
    """Train with each system for so many seconds, in one job; return of each a line about the worst
    of its ranks, and what was wrong."""
    with tempfile.TemporaryDirectory(prefix="reliability-") as text, Network(hosts) as network:
        folder, limit = Path(text), len(names) * seconds + SLACK
        (folder / "tmp").mkdir()
        command = ["sh", "-c", _RANK, sys.executable, "-m", "benchmarks.reliability.soaked"]
        command += [text, str(seconds), *names]
        gloo = {"MASTER_ADDR": network.address(1), "MASTER_PORT": "29500"}
        gloo |= {"GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": f"{text}/tmp", "FOLDER": text}
        start, env = network.job(command, ranks, **gloo)
        with (folder / "log").open("w") as log:
            process = network.start(start, stdout=log.fileno(), **env)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit)
        rows, problems = [], []
        for name in names:
            found = [json.loads(file.read_text()) for file in folder.glob(f"*.{name}.json")]
            wrong = {problem for rank in found for problem in rank["problems"]}
            wrong |= set() if found else {"it has not ended, or not begun"}
            problems += [f"{name}: {problem}" for problem in sorted(wrong)]
            if workers := [rank for rank in found if rank.get("steps")]:  # and no servers
                worst = {key: max(rank[key] for rank in workers) for key in workers[0]}
                rows.append(
                    f"{name:24}{worst['steps']:7} steps, loss {worst['first']:.2f} to "
                    f"{worst['last']:.3f}, grows {worst['grows'] / 2**10:.0f} KiB"
                )
        if process.poll() is None:
            problems.append(f"{names}: no end after {limit:.0f} s")
        elif process.returncode:
            problems.append(f"{names}: the job's exit status is {process.returncode}")
        else:
            problems += _left(network, folder, hosts, ranks)
        if problems:
            tqdm.write((folder / "log").read_text(errors="replace")[-5000:])
        return rows, problems


def _left(network: Network, folder: Path, hosts: int, ranks: int) -> list[str]:
    """Return texts of all that a job has left and should not have."""
    end, left = time.monotonic() + 10, [""]
    while left and time.monotonic() < end:  # helpers of MPI end behind mpirun
        left = [f"process {pid} is left" for host in network.hosts for pid in network.pids(host)]
        time.sleep(0.1)
    for host in network.hosts:
        shown = subprocess.run(network.on(host, ["ss", "-atuxHn"]), capture_output=True, text=True)
        sockets = [s for s in shown.stdout.splitlines() if "TIME-WAIT" not in s]
        left += [f"a socket is left: {' '.join(socket.split())}" for socket in sockets]
    for host in range(hosts):
        own = range(host * ranks, (host + 1) * ranks)
        shared = [(folder / f"{rank}.shm").read_text().split() for rank in own]
        left += [f"{file} is left in /dev/shm" for file in min(shared, key=len)]
    files = [file.name for file in (folder / "tmp").iterdir()]  # PyTorch keeps a cache there
    left += [f"{file} is left in TMPDIR" for file in files if not file.startswith("torchind")]
    return left
