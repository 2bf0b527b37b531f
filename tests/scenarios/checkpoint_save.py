"""First half of a checkpoint that changes hands: train, consolidate, save on rank 0."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from hvd_compress.torch import DGC
from tests.scenarios.common import distribute, make_model, sgd, train
from tests.scenarios.driver import hvd

METHOD = DGC(density=0.05)


FOLDER = Path(os.environ.get("CHECKPOINTS", "."))


def save_on_rank_0() -> None:
    model = make_model()
    optimizer = distribute(sgd(model, weight_decay=0.01), model, METHOD)
    train(model, optimizer, range(6))
    optimizer.consolidate_state_dict()
    means = {
        f"{name}.{key}": hvd.allreduce(x, name=f"{name}.{key}")
        for name, p in model.named_parameters()
        for key, x in optimizer.compression.store.state_of(p).items()
    }
    if hvd.rank() == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "means": means},
            FOLDER / f"{hvd.size()}.pt",
        )
