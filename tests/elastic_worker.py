"""Elastic training of a small model; the worker on the second host kills itself in mid-training."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

import hvd_compress.torch as hvd
from tests.scenarios.common import assert_same_everywhere, distribute, loss_of, make_model, sgd

STEPS, LAST_BEFORE = 12, 5
folder = Path(sys.argv[1])
torch.set_num_threads(1)
hvd.init()
model = make_model()
optimizer = distribute(sgd(model), model, hvd.DGC(density=0.05))
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)


def residual() -> torch.Tensor:
    return optimizer.compression.state_of(model[0].weight)["residual"]


@hvd.elastic.run
def train(state):
    if state.step:  # a new set of workers: all start from one mean residual
        assert_same_everywhere([*model.parameters(), residual()])
        assert residual().abs().sum() > 0
        note(event="resumed", step=state.step, residual=residual().norm().item())
    while state.step < STEPS:
        # Before backward, which sends: the others cannot finish this step.
        if state.step == LAST_BEFORE and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1":
            note(event="dies", step=state.step)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), state.step).backward()
        optimizer.step()
        state.step += 1
        state.commit()
    assert_same_everywhere(model)
    note(event="done", step=state.step, exchanges=optimizer.compression.step)


def note(**fields):
    with (folder / f"{os.getpid()}").open("a") as log:
        print(json.dumps(fields | {"rank": hvd.rank(), "size": hvd.size()}), file=log)


train(state)
