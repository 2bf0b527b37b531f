"""Campaigns of reliability; docs/reliability.md says what came of them.

    python -m benchmarks.reliability frames --cases 10000000 --jobs 2
    python -m benchmarks.reliability exchanges --cases 200000
    python -m benchmarks.reliability orders --cases 10000
    python -m benchmarks.reliability kills --runs 50 --only mpi ddp
    python -m benchmarks.reliability memory --steps 10000 --optimizers 1000
    python -m benchmarks.reliability soak --minutes 60

Each ends with status 1 if something came out that should not, and prints what, with the seed and
the number that make it again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.reliability.names import JOBS, METHODS


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    campaigns = made.add_subparsers(dest="campaign", required=True)

    def campaign(name: str, says: str) -> argparse.ArgumentParser:
        own = campaigns.add_parser(name, help=says, description=says)
        own.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
        own.add_argument("--seed", type=int, default=0)
        return own

    frames = campaign("frames", "damaged frames of every kind, each read by what reads such frames")
    frames.add_argument("--cases", type=int, default=1_000_000)
    frames.add_argument("--jobs", type=int, default=1, help="processes")
    frames.add_argument("--only", nargs="+", metavar="TEXT", help="frames whose names have it")
    frames.add_argument("--corpus", type=Path, metavar="FILE", help="only write one for each check")
    exchanges = campaign(
        "exchanges", "whole exchanges of every method, in which one message of one rank is damaged"
    )
    exchanges.add_argument("--cases", type=int, default=100_000)
    exchanges.add_argument("--jobs", type=int, default=1, help="processes")
    exchanges.add_argument("--only", nargs="+", metavar="TEXT", help="methods whose names have it")
    orders = campaign(
        "orders", "training of every method over a simulated MPI, by messages in random orders"
    )
    orders.add_argument("--cases", type=int, default=10_000)
    orders.add_argument("--jobs", type=int, default=1, help="processes")
    orders.add_argument("--only", nargs="+", metavar="TEXT", help="methods whose names have it")
    kills = campaign("kills", "jobs of which a rank is killed or stopped, or a link cut or slowed")
    kills.add_argument("--runs", type=int, default=10, help="of each job with each accident")
    kills.add_argument(
        "--only", nargs="+", choices=JOBS, default=JOBS, metavar="JOB", help=", ".join(JOBS)
    )
    kills.add_argument("--accidents", nargs="+", metavar="ACCIDENT", help="such as jitter")
    memory = campaign("memory", "resident memory over many steps, and over many optimizers")
    memory.add_argument("--ranks", type=int, default=2)
    memory.add_argument("--steps", type=int, default=10_000)
    memory.add_argument("--optimizers", type=int, default=1000)
    memory.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    soak = campaign("soak", "every system in turn on a network of hosts; needs root")
    soak.add_argument("--minutes", type=float, default=60, help="for all of them")
    soak.add_argument("--only", nargs="+", metavar="SYSTEM", help="as mpi_examples/systems.py has")
    return made


def main() -> int:
    options = parser().parse_args()
    for ends in (signal.SIGINT, signal.SIGTERM):  # with what was found by then
        signal.signal(ends, signal.default_int_handler)
    # Here, since --help shall need neither PyTorch nor MPI.
    if options.campaign in ("frames", "exchanges", "orders"):
        from benchmarks.reliability import damage as campaign
    elif options.campaign == "kills":
        from benchmarks.reliability import kills as campaign
    elif options.campaign == "soak":
        from benchmarks.reliability import soak as campaign
    else:
        from benchmarks.reliability import memory as campaign
    found, problems = campaign.run(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    for problem in problems[:20]:
        print(problem)
    print(f"{len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
