"""The campaign of kills: jobs of which a rank is killed or stopped, or a link cut or slowed.

It happens at a random instant, after all ranks have taken a step.  ``JOBS`` has the ends that are
right: all go on, or every other rank ends in time and somebody says why.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from tests import jobs
from tests.cluster import Network, unavailable

#: seconds of the jobs' own time-outs; that a job may need to start; and beyond its time-outs on a
#: busy machine
TIMEOUT, START, SLACK = 8.0, 300.0, 45.0
METHODS = ["none", "topk:density=0.05", "onebit", "fp8"]
#: what may come of an accident
GOES_ON, NAMED, ERROR, ENDED = "goes on", "error names it", "error", "launcher ends all"
_RECOVERY = ("--enable-recovery",)
_LATE = {"pause": {GOES_ON}, "jitter": {GOES_ON}}
_WORKER = [sys.executable, "-m", "benchmarks.reliability.worker"]


class Job(NamedTuple):
    """A job: its command without folder and method, and the accidents that happen to it, each with
    what may come of it."""

    command: list[str]
    accidents: dict[str, set[str]]
    ranks: int = 3
    environment: dict[str, str] = {}
    has_hosts: bool = False


def _mpirun(ranks: int, kind: str, *more: str) -> list[str]:
    start = jobs.launcher(ranks, "mpirun")
    return [*start[:1], *more, *start[1:], *_WORKER, kind]


JOBS = {
    "horovod": Job(_mpirun(3, "horovod"), {"kill": {ENDED}, **_LATE}),
    "horovod-gloo": Job(
        [*jobs.launcher(3, "gloo"), *_WORKER, "horovod"],
        {"kill": {ENDED, ERROR, NAMED}, "stop": {ENDED, ERROR, NAMED}, **_LATE},
        environment={"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"},
    ),
    "mpi": Job(
        _mpirun(3, "mpi"),
        {"kill": {ENDED, NAMED}, "kill-recovery": {NAMED}, "stop": {NAMED}, **_LATE},
    ),
    "ddp": Job(
        ["torchrun", "--standalone", "--nproc-per-node", "3", *_WORKER[1:], "ddp"],
        {"kill": {ENDED, ERROR, NAMED}, "stop": {ERROR, NAMED}, **_LATE},
    ),
    "server": Job(
        _mpirun(4, "server", *_RECOVERY),
        {
            **{"kill": {GOES_ON}, "stop": {GOES_ON}, **_LATE},
            **{"kill-server": {NAMED}, "stop-server": {NAMED}},
        },
        ranks=4,
    ),
    "network": Job(
        [*_WORKER, "mpi"],
        {"cut": {NAMED}, "flap": {GOES_ON}, "slow": {GOES_ON}, "jitter": {GOES_ON}},
        has_hosts=True,
    ),
}


class Running:
    """A job with its folder, whose ranks write there what they do."""

    def __init__(self, process: Any, folder: Path, ranks: int, network: Any = None) -> None:
        self.process, self.folder, self.ranks, self.network = process, folder, ranks, network

    def text(self, rank: int, what: str) -> str:
        file = self.folder / f"{rank}.{what}"
        return file.read_text() if file.exists() else ""

    def steps(self, rank: int) -> int:
        return int(self.text(rank, "steps") or 0)

    def signal(self, rank: int, number: int) -> None:
        os.kill(int(self.text(rank, "pid")), number)

    def lives(self, rank: int) -> bool:
        """Return whether a rank's process is there, and no zombie."""
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{self.text(rank, 'pid')}/stat").read_text()
            return stat.rpartition(")")[2].split()[0] != "Z"
        return False


def run(options: argparse.Namespace) -> list[str]:
    """Run the campaign; return what came out that should not."""
    names, problems = options.only or [*JOBS], []
    if "network" in names and (reason := unavailable()):
        problems.append(f"network: {reason}")
        names = [name for name in names if name != "network"]
    cases = [
        (name, accident, number)
        for number in range(options.runs)
        for name in names
        for accident in JOBS[name].accidents
        if accident in (options.accidents or [accident])
    ]
    #: of each accident of each job what came of it, and the seconds
    found: dict[tuple[str, str], list[tuple[str, float]]] = collections.defaultdict(list)
    with contextlib.suppress(KeyboardInterrupt):  # what was done by then counts
        for name, accident, number in tqdm(cases, ncols=90):
            draw = random.Random(f"{options.seed}-{name}-{accident}-{number}")
            with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
                word, seconds, problem = _one(JOBS[name], accident, Path(folder), draw)
            found[name, accident].append((word, seconds))
            if problem:
                problems.append(f"--seed {options.seed} {name} {accident} {number}: {problem}")
                tqdm.write(problems[-1])
    print()
    for (name, accident), rows in found.items():
        words = collections.Counter(word for word, _ in rows)
        text = ", ".join(f"{count} {word}" for word, count in words.most_common())
        longest = max(seconds for _, seconds in rows)
        print(f"{name:14}{accident:15}{len(rows):4} runs: {text}; {longest:.1f} s at most")
    return problems


@contextlib.contextmanager
def _started(job: Job, accident: str, folder: Path, method: str) -> Iterator[Running]:
    command = [*job.command, str(folder), method]
    if accident == "kill-recovery":
        command[1:1] = _RECOVERY
    own = {"RELIABILITY_TIMEOUT": str(TIMEOUT), **job.environment}
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("w"))
        if job.has_hosts:
            network = stack.enter_context(Network(job.ranks))
            start, own = network.job(command, **own)
            process = network.start(start, stdout=log.fileno(), **own)
            yield Running(process, folder, job.ranks, network)
            return
        options: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
        options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
        process = subprocess.Popen(command, env=jobs.environment(**own), **options)
        running = Running(stack.enter_context(process), folder, job.ranks)
        try:
            yield running
        finally:
            jobs.kill(process)
            for rank in range(job.ranks):  # torchrun's are in sessions of their own
                with contextlib.suppress(OSError, ValueError):
                    running.signal(rank, signal.SIGKILL)


def _one(job: Job, accident: str, folder: Path, draw: random.Random) -> tuple[str, float, str]:
    """Return what came of an accident, the seconds until then, and what is wrong with it."""
    with _started(job, accident, folder, draw.choice(METHODS)) as running:
        ranks, first = range(job.ranks), int(job is JOBS["server"])

        def all_train() -> bool:
            # Beyond the first step, in which the network is measured; a server counts none.
            return all(running.steps(r) > int(r >= first) for r in ranks)

        if not _holds(all_train, START):
            return "no start", START, f"did not start: {_log(folder)}"
        time.sleep(draw.uniform(0, 1.5))
        victim = 0 if "server" in accident else draw.randrange(first, job.ranks)
        start = time.monotonic()
        _happen(accident, running, victim, draw)
        is_gone = accident.partition("-")[0] in ("kill", "stop")
        survivors = [rank for rank in ranks if rank != victim or not is_gone]
        may = job.accidents[accident]
        if GOES_ON in may:
            word, problem = _goes_on(running, survivors)
        else:
            word, problem = _ends(running, survivors, victim)
        seconds = time.monotonic() - start
        if word not in may and not problem:
            problem = f"{word}, not one of {sorted(may)}"
        return word, seconds, problem and f"{problem}; rank {victim}\n{_log(folder)}"


def _log(folder: Path) -> str:
    return (folder / "log").read_text(errors="replace")[-3000:]


def _holds(condition: Callable[[], bool], seconds: float = TIMEOUT + SLACK) -> bool:
    """Wait until a condition holds, and return whether it does in time."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return holds


def _happen(accident: str, job: Running, victim: int, draw: random.Random) -> None:
    what = accident.partition("-")[0]
    if what == "jitter":
        _delay(job, draw)
    elif what == "kill":
        job.signal(victim, signal.SIGKILL)
    elif what in ("stop", "pause"):
        job.signal(victim, signal.SIGSTOP)
        if what == "pause":
            time.sleep(draw.uniform(0.1, TIMEOUT / 4))
            job.signal(victim, signal.SIGCONT)
    elif what == "slow":
        job.network.slow(victim + 1, draw.choice(("5mbit", "20mbit", "100mbit")))
    else:
        job.network.cut(victim + 1)
        if what == "flap":
            time.sleep(draw.uniform(0.1, TIMEOUT / 4))
            job.network.mend(victim + 1)


def _delay(job: Running, draw: random.Random) -> None:
    """Delay messages for some seconds, in another order of the ranks each time.

    Each rank stops for moments.  On a network its link is cut for moments, or gets another rate.
    """
    end = time.monotonic() + TIMEOUT / 2
    while time.monotonic() < end:
        some = draw.sample(range(job.ranks), draw.randrange(1, job.ranks + 1))
        cut = [rank for rank in some if job.network and draw.random() < 0.3]
        for rank in cut:
            job.network.cut(rank + 1)
        for rank in some:
            job.signal(rank, signal.SIGSTOP)
        draw.shuffle(some)
        for rank in some:
            time.sleep(draw.uniform(0, 0.2))
            job.signal(rank, signal.SIGCONT)
            if rank in cut:
                job.network.mend(rank + 1)
            elif job.network:
                job.network.slow(rank + 1, draw.choice(("20mbit", "100mbit", "1gbit")))
        time.sleep(draw.uniform(0, 0.05))


def _goes_on(job: Running, survivors: list[int]) -> tuple[str, str]:
    """The ranks that are left take five more steps, and end well when they are asked to."""
    before = {rank: now for rank in survivors if (now := job.steps(rank)) > 1}  # no servers

    def ends() -> dict[int, str]:
        return {rank: end for rank in survivors if (end := job.text(rank, "end"))}

    def have_moved() -> bool:
        return all(job.steps(rank) >= now + 5 for rank, now in before.items())

    if not _holds(lambda: have_moved() or bool(ends())) or any(map(str.strip, ends().values())):
        return "stands still", f"ranks stand still: {ends() or before}"
    (job.folder / "stop").touch()
    if not _holds(lambda: len(ends()) == len(survivors)):
        return "does not end", f"only ranks {[*ends()]} end when they are asked to"
    errors = [end for end in ends().values() if end.strip()]
    return GOES_ON, f"in the end: {errors}" if errors else ""


def _ends(job: Running, survivors: list[int], victim: int) -> tuple[str, str]:
    """Every survivor ends, and the launcher with them."""
    if not _holds(lambda: not any(map(job.lives, survivors))):
        return "hang", f"ranks {[rank for rank in survivors if job.lives(rank)]} live on"
    ends = [end for rank in survivors if (end := job.text(rank, "end"))]
    if not all(map(str.strip, ends)):
        return "success", "a survivor ended as if all were well"
    if any(re.search(rf"\brank {victim}\b", end) for end in ends):
        return NAMED, ""
    if ends:
        return ERROR, ""
    with contextlib.suppress(subprocess.TimeoutExpired):
        job.process.wait(SLACK)
    return ENDED, "" if job.process.returncode else f"exit status {job.process.returncode}"
