"""Campaigns of reliability; docs/reliability.md says what came of them.

    python -m benchmarks.reliability frames --cases 10000000
    python -m benchmarks.reliability exchanges --cases 200000
    python -m benchmarks.reliability kills --runs 50 --only mpi ddp
    python -m benchmarks.reliability memory --steps 10000 --optimizers 1000
    python -m benchmarks.reliability soak --minutes 60

Each ends with status 1 if something came out that should not, and prints what, with the seed and
the number that make it again.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from pathlib import Path

MEMORY_METHODS = [
    "none",
    "fp16",
    "topk:density=0.05",
    "dgc:density=0.05",
    "powersgd",
    "onebit",
    "fp8",
]
MEMORY_METHODS += ["ef21:density=0.05"]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.reliability",
        description=str(__doc__),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    campaigns = made.add_subparsers(dest="campaign", required=True)

    def campaign(name: str, says: str, module: str, only: str) -> argparse.ArgumentParser:
        own = campaigns.add_parser(name, help=says, description=says)
        own.set_defaults(module=module)
        own.add_argument("--seed", type=int, default=0)
        own.add_argument("--only", nargs="+", metavar="NAME", help=only)
        return own

    says = "damaged frames of every kind, each read by what reads such frames"
    own = campaign("frames", says, "damage", "frames whose names have it")
    own.add_argument("--cases", type=int, default=1_000_000)
    own.add_argument("--corpus", type=Path, metavar="FILE", help="only write one for each check")
    says = "whole exchanges of every method, in which one message of one rank is damaged"
    own = campaign("exchanges", says, "damage", "methods whose names have it")
    own.add_argument("--cases", type=int, default=100_000)
    says = "jobs of which a rank is killed or stopped, or a link cut or slowed"
    own = campaign("kills", says, "kills", "jobs: horovod, horovod-gloo, mpi, ddp, server, network")
    own.add_argument("--runs", type=int, default=10, help="of each job with each accident")
    own.add_argument("--accidents", nargs="+", metavar="ACCIDENT", help="such as jitter")
    says = "resident memory over many steps, and over many optimizers"
    own = campaign("memory", says, "memory", "methods")
    own.add_argument("--ranks", type=int, default=2)
    own.add_argument("--steps", type=int, default=10_000)
    own.add_argument("--optimizers", type=int, default=1000)
    own.set_defaults(only=MEMORY_METHODS)
    says = "every system in turn on a network of hosts; needs root"
    own = campaign("soak", says, "soak", "systems, as mpi_examples/all_systems.py has")
    own.add_argument("--minutes", type=float, default=60, help="for all of them")
    return made


def main() -> int:
    options = parser().parse_args()
    for ends in (signal.SIGINT, signal.SIGTERM):  # with what was found by then
        signal.signal(ends, signal.default_int_handler)
    # Here, since --help shall need neither PyTorch nor MPI.
    problems = importlib.import_module(f"benchmarks.reliability.{options.module}").run(options)
    for problem in problems[:20]:
        print(problem)
    print(f"{len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
