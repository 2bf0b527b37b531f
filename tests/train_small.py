"""Train a small model: ``train_small.py FOLDER STEPS [STEP AT WHICH RANK 1 IS KILLED]``."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch

import hvd_compress.torch as hvd
from tests.scenarios.common import distribute, loss_of, make_model, sgd

folder, steps, killed_at = Path(sys.argv[1]), int(sys.argv[2]), [int(s) for s in sys.argv[3:]]
torch.set_num_threads(1)
hvd.init()
model = make_model()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = distribute(sgd(model), model, hvd.DGC)
optimizer.compression.report_at_exit()
for step in range(steps):
    if step in killed_at and hvd.rank() == 1:
        print("rank 1 is killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), step).backward()
    optimizer.step()
data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
result = {
    "rank": hvd.rank(),
    "size": hvd.size(),
    "steps": optimizer.compression.stats().total.steps,
    "ratio": optimizer.compression.stats().total.ratio,
    "digest": hashlib.sha256(data).hexdigest(),
}
(folder / str(hvd.rank())).write_text(json.dumps(result))
