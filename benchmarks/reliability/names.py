"""What the command line offers, and what the campaigns of kills have in common."""

from __future__ import annotations

from typing import NamedTuple

#: jobs of the campaign of kills
JOBS = ["horovod", "horovod-gloo", "mpi", "ddp", "server", "elastic", "network"]
#: methods of the campaign of memory
METHODS = ["none", "fp16", "topk:density=0.05", "dgc:density=0.05", "powersgd", "onebit", "fp8"]
METHODS += ["ef21:density=0.05"]
#: methods of the campaign of kills
KILLED = ["none", "topk:density=0.05", "onebit", "fp8"]
#: seconds that a job may need to start, and beyond its time-outs on a busy machine
START, SLACK = 300.0, 45.0
#: what may come of an accident
GOES_ON = "goes on"


class Outcome(NamedTuple):
    """Of a run: ``word`` says what came of it, ``problem`` what should not have, or nothing."""

    word: str
    seconds: float
    problem: str = ""
