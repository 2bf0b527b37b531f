"""Elastic jobs of Horovod in which a worker is killed, joins or leaves at a random instant."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.reliability.names import GOES_ON, KILLED, SLACK, START, Outcome
from tests import jobs

#: what happens, with the hosts before and after it, and the number of workers in the end
ACCIDENTS = {
    "kill": ("localhost:1\n127.0.0.1:1", "localhost:1\n127.0.0.1:1", 2),
    "join": ("localhost:1", "localhost:2", 2),
    "leave": ("localhost:1\n127.0.0.1:1", "localhost:1", 1),
}
_OPTIONS = ["--min-np", "1", "--max-np", "3", "--network-interfaces", "lo"]
_OPTIONS += ["--blacklist-cooldown-range", "1", "2"]
_VARIABLES = {"HOROVOD_ELASTIC": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}


def one(name: str, accident: str, folder: Path, draw: random.Random) -> Outcome:
    """Run a job: it goes on after the accident, with as many workers as there are places, and ends
    well when it is asked to."""
    before, after, size = ACCIDENTS[accident]
    _write(folder, before)
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discover.chmod(0o755)
    count = len(before.splitlines())
    command = ["horovodrun", "--gloo", "-np", str(count), *_OPTIONS]
    command += ["--host-discovery-script", str(discover), sys.executable, "-m"]
    command += ["benchmarks.reliability.elastic", str(folder), draw.choice(KILLED)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=jobs.environment(**_VARIABLES),
            start_new_session=True,
        )
        try:
            return _watched(accident, folder, process, draw, count, after, size)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for file in folder.glob("*.worker"):
                with contextlib.suppress(OSError):
                    os.kill(int(file.stem), signal.SIGKILL)
            process.wait()


def _watched(
    accident: str,
    folder: Path,
    process: Any,
    draw: random.Random,
    count: int,
    after: str,
    size: int,
) -> Outcome:
    def trains(size: int, least: int = 3, but: tuple[int, ...] = ()) -> bool:
        states = {int(f.stem): _read(f) for f in folder.glob("*.worker")}
        found = [s for pid, s in states.items() if pid not in but and s and s["size"] == size]
        found = [s for s in found if s["taken"] >= least]
        return len({s["rank"] for s in found}) == size

    def wait(condition: Any, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not condition() and time.monotonic() < end and process.poll() is None:
            time.sleep(0.1)
        return bool(condition())

    def bad(word: str, start: float) -> Outcome:
        text = (folder / "log").read_text(errors="replace")[-3000:]
        return Outcome(word, time.monotonic() - start, f"{word}: {text}")

    begun = time.monotonic()
    if not wait(lambda: trains(count), START):
        return bad("no start", begun)
    time.sleep(draw.uniform(0, 1.5))
    start, victims = time.monotonic(), ()
    if accident == "kill":
        # Not the one with rank 0: with it the state of all would be lost, perhaps.
        others = [int(f.stem) for f in folder.glob("*.worker") if (s := _read(f)) and s["rank"]]
        victims = (draw.choice(others),)
        os.kill(victims[0], signal.SIGKILL)
    for file in folder.glob("*.worker"):  # what they did before does not count
        (folder / f"{file.stem}.again").touch()
    _write(folder, after)
    if not wait(lambda: trains(size, but=victims), 2 * START):
        return bad("stands still", start)
    seconds = time.monotonic() - start
    (folder / "stop").touch()
    if not wait(lambda: process.poll() is not None, START + SLACK):
        return bad("does not end", start)
    done = [s for f in folder.glob("*.worker") if (s := _read(f)) and s["done"]]
    if len(done) != size or len({s["sum"] for s in done}) != 1:
        return bad(f"{len(done)} of {size} end alike: {done}", start)
    return Outcome(GOES_ON, seconds)


def _write(folder: Path, hosts: str) -> None:
    new = folder / "hosts.new"
    new.write_text(hosts + "\n")
    new.rename(folder / "hosts")


def _read(file: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return None


def main(folder: Path, method: str) -> None:
    """Train as a worker; ``taken`` counts steps with the workers of now."""
    import torch

    import hvd_compress.torch as hvd
    from tests.scenarios.common import distribute, loss_of, make_model, sgd

    torch.set_num_threads(1)
    hvd.init()
    model = make_model()
    optimizer = distribute(sgd(model), model, method)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    me = folder / f"{os.getpid()}.worker"

    def note(**fields: Any) -> None:
        draft = me.with_suffix(".draft")
        draft.write_text(json.dumps({"rank": hvd.rank(), "size": hvd.size(), **fields}))
        draft.rename(me)

    @hvd.elastic.run
    def train(state: Any) -> None:
        taken = 0
        while True:
            if (again := me.with_suffix(".again")).exists():
                again.unlink()
                taken = 0
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), state.step).backward()
            optimizer.step()
            state.step, taken = state.step + 1, taken + 1
            note(taken=taken, done=False)
            flag = torch.tensor([float((folder / "stop").exists())])
            if hvd.allreduce(flag, name="stop", op=hvd.Max)[0]:
                break
            time.sleep(0.02)
            state.commit()
        total = sum(p.detach().double().sum().item() for p in model.parameters())
        note(taken=taken, done=True, sum=total)

    train(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
