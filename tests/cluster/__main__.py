"""Run a command as MPI ranks on several hosts: ``python tests/cluster --help``."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

# So that it starts by its path as well as by its name.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests import jobs
from tests.cluster import Network, NetworkError, unavailable


def main() -> int:
    options = parse()
    # `timeout` and `kill` shall not leave the network behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    reason = unavailable() or (jobs.mpich_missing() if options.mpi == "mpich" else None)
    if reason:
        return fail(reason)
    try:
        limits = {name: getattr(options, name) for name in ("rate", "burst", "latency")}
        with Network(options.hosts, **limits) as network:
            return run(network, options)
    except NetworkError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cluster",
        description="Run a command as MPI ranks on several hosts, which are network namespaces of "
        "this machine with links of a limited rate. Needs root.",
        usage="%(prog)s [options] -- COMMAND...",
    )
    add = parser.add_argument
    add("--hosts", type=int, default=4, metavar="N", help="4 if not given")
    add("--rate", default="1gbit", help="of each link, each way; 1gbit if not given")
    add("--burst", default="16kb", help="what passes a link at once; 16kb if not given")
    add("--latency", default="300ms", help="longest wait at a link; 300ms if not given")
    add("--ranks-per-host", type=int, default=1, metavar="N", help="1 if not given")
    add("--mpi", choices=["openmpi", "mpich"], default="openmpi")
    add("--tag", action="store_true", help="put the rank before what it prints")
    add("--timeout", type=float, metavar="SECONDS", help="kill the job after that; status 124")
    add("command", nargs="+", metavar="COMMAND", help="python script.py ...")
    return parser.parse_args()


def run(network: Network, options: argparse.Namespace) -> int:
    start, env = network.job(
        options.command, options.ranks_per_host, mpi=options.mpi, tag=options.tag
    )
    before = network.traffic()
    job = network.start(start, stdout=None, **env)
    try:
        status = job.wait(options.timeout)
    except subprocess.TimeoutExpired:
        jobs.kill(job)
        status = fail(f"no end after {options.timeout:g} s", 124)
    print(f"\n{'host':<6}{'received':>16}{'sent':>16}  bytes")
    for host, now in network.traffic().items():
        received, sent = now.received - before[host].received, now.sent - before[host].sent
        print(f"h{host:<5}{received:>16,}{sent:>16,}")
    return status


def fail(message: str, status: int = 2) -> int:
    print(f"cluster: error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
