"""The campaign of kills: jobs of which a rank is killed or stopped, or a link cut or slowed.

At a random instant, after all ranks have taken a step.  What must come of it is in ``_EXPECTED``:
either all go on, or every other rank ends in time, and somebody says why.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
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

from benchmarks.reliability import elastic
from benchmarks.reliability.names import GOES_ON, KILLED, SLACK, START, Outcome
from tests import jobs
from tests.cluster import Network, unavailable

#: seconds of the jobs' own time-outs
TIMEOUT = 8.0
_WORKER = "benchmarks.reliability.worker"


class Running:
    """A job with its folder, whose ranks write there what they do."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, ranks: int) -> None:
        self.process, self.folder, self.ranks, self.log = process, folder, ranks, folder / "log"

    def steps(self, rank: int) -> int:
        file = self.folder / f"{rank}.steps"
        return int(file.read_text()) if file.exists() else 0

    def pid(self, rank: int) -> int:
        return int((self.folder / f"{rank}.pid").read_text())

    def end(self, rank: int) -> list[Any] | None:
        file = self.folder / f"{rank}.end"
        return json.loads(file.read_text()) if file.exists() else None

    def lives(self, rank: int) -> bool:
        """Return whether a rank's process is there, and no zombie."""
        with contextlib.suppress(OSError):
            return (
                Path(f"/proc/{self.pid(rank)}/stat").read_text().rpartition(")")[2].split()[0]
                != "Z"
            )
        return False

    def place(self, rank: int) -> str:
        """Return where a rank's threads are."""
        with contextlib.suppress(OSError):
            os.kill(self.pid(rank), signal.SIGUSR1)
            time.sleep(1)
            return f"\nrank {rank}: {(self.folder / f'{rank}.trace').read_text()}"
        return ""

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not (holds := condition()) and time.monotonic() < end:
            time.sleep(0.05)
        return holds

    def output(self) -> str:
        return self.log.read_text(errors="replace")


def _command(kind: str, ranks: int, controller: str, *more: str) -> list[str]:
    if controller == "torchrun":
        start = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    else:
        start = jobs.launcher(ranks, controller)
    start[1:1] = more
    return [*start, sys.executable, "-m", _WORKER, kind]


class Job(NamedTuple):
    """A job: its command without folder and method, the accidents that happen to it, each with what
    may come of it, and a text by which the error of a survivor is known."""

    command: list[str]
    accidents: dict[str, set[str]]
    ranks: int = 3
    environment: dict[str, str] = {}
    hosts: int = 0


#: what may come of an accident
NAMED, ERROR, ENDED = "error names it", "error", "launcher ends all"
_RECOVERY = ("--enable-recovery",)
JOBS = {
    "horovod": Job(
        _command("horovod", 3, "mpirun"),
        {"kill": {ENDED}, "pause": {GOES_ON}, "jitter": {GOES_ON}},
    ),
    "horovod-gloo": Job(
        _command("horovod", 3, "gloo"),
        {
            "kill": {ENDED, ERROR, NAMED},
            "stop": {ENDED, ERROR, NAMED},
            "pause": {GOES_ON},
            "jitter": {GOES_ON},
        },
        environment={"HOROVOD_GLOO_TIMEOUT_SECONDS": "10"},
    ),
    "mpi": Job(
        _command("mpi", 3, "mpirun"),
        {
            "kill": {ENDED, NAMED},
            "kill-recovery": {NAMED},
            "stop": {NAMED},
            "pause": {GOES_ON},
            "jitter": {GOES_ON},
        },
    ),
    "ddp": Job(
        _command("ddp", 3, "torchrun"),
        {
            "kill": {ENDED, ERROR, NAMED},
            "stop": {ERROR, NAMED},
            "pause": {GOES_ON},
            "jitter": {GOES_ON},
        },
    ),
    "server": Job(
        _command("server", 4, "mpirun", *_RECOVERY),
        {
            "kill": {GOES_ON},
            "stop": {GOES_ON},
            "pause": {GOES_ON},
            "kill-server": {NAMED},
            "stop-server": {NAMED},
            "jitter": {GOES_ON},
        },
        ranks=4,
    ),
    "network": Job(
        [sys.executable, "-m", _WORKER, "mpi"],
        {"cut": {NAMED}, "flap": {GOES_ON}, "slow": {GOES_ON}, "jitter": {GOES_ON}},
        hosts=3,
    ),
}


def run(options: argparse.Namespace) -> tuple[Any, list[str]]:
    """Run the campaign; return what was counted, and what came out that should not."""
    found: list[dict[str, Any]] = []
    problems: list[str] = []
    if "network" in options.only and (reason := unavailable()):
        problems.append(f"network: {reason}")
        options.only.remove("network")
    cases = [
        (name, accident, number)
        for number in range(options.runs)
        for name in options.only
        for accident in (elastic.ACCIDENTS if name == "elastic" else JOBS[name].accidents)
        if accident in (options.accidents or [accident])
    ]
    with contextlib.suppress(KeyboardInterrupt):  # what was done by then counts
        for name, accident, number in tqdm(cases, ncols=90):
            draw = random.Random(f"{options.seed}-{name}-{accident}-{number}")
            with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
                one = elastic.one if name == "elastic" else _one
                outcome = one(name, accident, Path(folder), draw)
            found.append({"job": name, "accident": accident, "number": number, **outcome._asdict()})
            if outcome.problem:
                of = f"--seed {options.seed} {name} {accident} {number}"
                problems.append(f"{of}: {outcome.problem}")
                tqdm.write(problems[-1])
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))
    print()
    for job, accident in dict.fromkeys((row["job"], row["accident"]) for row in found):
        rows = [row for row in found if (row["job"], row["accident"]) == (job, accident)]
        words = collections.Counter(row["word"] for row in rows)
        longest = max(row["seconds"] for row in rows)
        text = ", ".join(f"{count} {word}" for word, count in words.most_common())
        print(f"{job:14}{accident:15}{len(rows):4} runs: {text}; {longest:.1f} s at most")
    return found, problems


@contextlib.contextmanager
def _started(job: Job, accident: str, folder: Path, method: str) -> Iterator[tuple[Running, Any]]:
    command = [*job.command, str(folder), method]
    if accident == "kill-recovery":
        command[1:1] = _RECOVERY
    own = {"RELIABILITY_TIMEOUT": str(TIMEOUT), **job.environment}
    if job.hosts:
        with Network(job.hosts) as network, (folder / "log").open("w") as log:
            start, own = network.job(command, **own)
            process = network.start(start, stdout=log.fileno(), **own)
            yield Running(process, folder, job.hosts), network
        return
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=jobs.environment(**own),
            start_new_session=True,
        ) as process,
    ):
        running = Running(process, folder, job.ranks)
        try:
            yield running, None
        finally:
            jobs.kill(process)
            for rank in range(job.ranks):  # torchrun's are in sessions of their own
                with contextlib.suppress(OSError):
                    os.kill(running.pid(rank), signal.SIGKILL)


def _one(name: str, accident: str, folder: Path, draw: random.Random) -> Outcome:
    job = JOBS[name]
    with _started(job, accident, folder, draw.choice(KILLED)) as (running, network):
        ranks = range(running.ranks)

        def all_train() -> bool:
            # Beyond the first step, in which the network is measured; a server counts none.
            return all(running.steps(r) > (name != "server" or r > 0) for r in ranks)

        if not running.wait(all_train, START):
            return Outcome("no start", START, f"did not start: {running.output()[-2000:]}")
        time.sleep(draw.uniform(0, 1.5))
        victim = 0 if "server" in accident else draw.randrange(int(name == "server"), len(ranks))
        start = time.monotonic()
        _happen(accident, running, victim, network, draw)
        gone = victim if accident.split("-")[0] in ("kill", "stop") else None
        survivors = [rank for rank in ranks if rank != gone]
        may = job.accidents[accident]
        if GOES_ON in may:
            outcome = _goes_on(running, survivors, start)
        else:
            outcome = _ends(running, survivors, victim, start)
        if outcome.word not in may and not outcome.problem:
            outcome = outcome._replace(problem=f"{outcome.word}, not one of {sorted(may)}")
        if outcome.problem:
            text = f"{outcome.problem}; rank {victim}\n{running.output()[-3000:]}"
            outcome = outcome._replace(problem=text)
        return outcome


def _happen(accident: str, job: Running, victim: int, network: Any, draw: random.Random) -> None:
    what = accident.split("-")[0]
    if what == "jitter":
        _delay(job, network, draw)
    elif what == "kill":
        os.kill(job.pid(victim), signal.SIGKILL)
    elif what in ("stop", "pause"):
        os.kill(job.pid(victim), signal.SIGSTOP)
        if what == "pause":
            time.sleep(draw.uniform(0.1, TIMEOUT / 4))
            os.kill(job.pid(victim), signal.SIGCONT)
    elif what == "slow":
        network.slow(victim + 1, draw.choice(("5mbit", "20mbit", "100mbit")))
    else:
        network.cut(victim + 1)
        if what == "flap":
            time.sleep(draw.uniform(0.1, TIMEOUT / 4))
            network.mend(victim + 1)


def _delay(job: Running, network: Any, draw: random.Random) -> None:
    """For some seconds all that is sent comes late, and from the ranks in another order every time:
    each stops for moments, and on a network its link is cut for moments, or gets another rate."""
    end = time.monotonic() + TIMEOUT / 2
    while time.monotonic() < end:
        some = draw.sample(range(job.ranks), draw.randrange(1, job.ranks + 1))
        cut = [rank for rank in some if network and draw.random() < 0.3]
        for rank in cut:
            network.cut(rank + 1)
        for rank in some:
            os.kill(job.pid(rank), signal.SIGSTOP)
        draw.shuffle(some)
        for rank in some:
            time.sleep(draw.uniform(0, 0.2))
            os.kill(job.pid(rank), signal.SIGCONT)
            if rank in cut:
                network.mend(rank + 1)
            elif network:
                network.slow(rank + 1, draw.choice(("20mbit", "100mbit", "1gbit")))
        time.sleep(draw.uniform(0, 0.05))


def _goes_on(job: Running, survivors: list[int], start: float) -> Outcome:
    """The ranks that are left take five more steps, and end well when they are asked to."""
    before = {rank: now for rank in survivors if (now := job.steps(rank)) > 1}  # no servers

    def have_moved() -> bool:
        return all(job.steps(rank) >= now + 5 for rank, now in before.items())

    moved = job.wait(lambda: have_moved() or any(map(job.end, survivors)), TIMEOUT + SLACK)
    seconds = time.monotonic() - start
    errors = [end for rank in survivors if (end := job.end(rank)) and end[0]]
    if errors or not moved:
        return Outcome("stands still", seconds, f"ranks stand still: {errors or before}")
    (job.folder / "stop").touch()
    if not job.wait(lambda: all(map(job.end, survivors)), TIMEOUT + SLACK):
        left = [rank for rank in survivors if not job.end(rank)]
        return Outcome("does not end", seconds, f"ranks {left} do not end when they are asked to")
    errors = [end for rank in survivors if (end := job.end(rank)) and end[0]]
    problem = f"in the end: {errors}" if errors else ""
    return Outcome(GOES_ON, seconds, problem)


def _ends(job: Running, survivors: list[int], victim: int, start: float) -> Outcome:
    """Every survivor ends, and the launcher with them."""

    def are_gone() -> bool:
        return not any(map(job.lives, survivors))

    gone = job.wait(are_gone, TIMEOUT + SLACK)
    seconds = time.monotonic() - start
    if not gone:
        left = [rank for rank in survivors if job.lives(rank)]
        text = f"ranks {left} live on; ends: {list(map(job.end, survivors))}"
        return Outcome("hang", seconds, text + "".join(map(job.place, left)))
    ends = [end for rank in survivors if (end := job.end(rank))]
    if any(not name for name, *_ in ends):
        return Outcome("success", seconds, "a survivor ended as if all were well")
    names = re.compile(rf"\brank {victim}\b")
    if any(names.search(message) for _, message, _ in ends):
        return Outcome(NAMED, seconds)
    if ends:
        return Outcome(ERROR, seconds)
    if job.process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(SLACK)
    if not job.process.returncode:
        return Outcome("success", seconds, f"exit status {job.process.returncode}")
    return Outcome(ENDED, seconds)
