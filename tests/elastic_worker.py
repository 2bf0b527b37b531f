"""Elastic training of a small model, of which workers join and die: ``elastic_worker.py FOLDER
METHOD``.  The hosts that there are stand in a file of the folder, which the workers change."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import hvd_compress.torch as hvd
from tests.scenarios.common import assert_same_everywhere, distribute, loss_of, make_model, sgd

#: the hosts of each phase, and the number of workers; in the last, one is started again
PHASES = [
    ("localhost:1", 1),
    ("localhost:2", 2),
    ("localhost:2\n127.0.0.1:1", 3),
    ("localhost:2\n127.0.0.1:1", 3),
]
STEPS, MOST = 4, 600
folder, method = Path(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
hvd.init()
model = make_model()
if method == "diloco":
    optimizer = hvd.DistributedOptimizer(
        sgd(model), method=hvd.DiLoCo(sync_every=2), named_parameters=model.named_parameters()
    )
else:
    optimizer = distribute(sgd(model), model, method)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, phase=0)


def kept() -> list[torch.Tensor]:
    """The values that all must begin with that meet again."""
    own = [] if method == "diloco" else [optimizer.compression.store.state_of(model[0].weight)]
    return [*model.parameters(), *(x for entries in own for _, x in sorted(entries.items()))]


def write(hosts: str) -> None:
    new = folder / "hosts.new"
    new.write_text(hosts + "\n")
    new.rename(folder / "hosts")


@hvd.elastic.run
def train(state):
    assert_same_everywhere(kept())
    if state.step and method != "diloco":
        assert kept()[-1].abs().sum() > 0
    note(event="meets", step=state.step, phase=state.phase)
    taken = waited = 0
    for _ in range(MOST):
        if state.phase == len(PHASES):
            break
        hosts, size = PHASES[state.phase]
        if state.phase == 3 and not (folder / "dead").exists():
            if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
                (folder / "dead").touch()
                time.sleep(1)  # Horovod may wait for ever if it is just then that others submit
                os.kill(os.getpid(), signal.SIGKILL)
        elif hvd.size() != size:
            # Horovod tells once what hosts there are, and workers that meet anew just then forget
            # it: after some seconds it is said in other words, with a place more than are taken.
            if hvd.rank() == 0 and waited % 50 == 0:
                write(hosts if waited % 100 == 0 else hosts.replace("127.0.0.1:1", "127.0.0.1:2"))
            waited += 1
            time.sleep(0.1)
        else:
            taken += 1
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), state.step).backward()
        optimizer.step()
        state.step += 1
        if taken == STEPS:
            state.phase, taken = state.phase + 1, 0
        state.commit()
    assert state.phase == len(PHASES), state.phase
    if method == "diloco":
        optimizer.synchronize_parameters()
    assert_same_everywhere(model)
    note(event="done", step=state.step, phase=state.phase)


def note(**fields):
    with (folder / f"{os.getpid()}").open("a") as log:
        print(json.dumps(fields | {"rank": hvd.rank(), "size": hvd.size()}), file=log)


train(state)
