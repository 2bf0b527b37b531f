"""Second half: every rank loads what rank 0 saved, with this or another number of ranks."""

from __future__ import annotations

import torch

from tests.scenarios.checkpoint_save import FOLDER, METHOD
from tests.scenarios.common import assert_same_everywhere, distribute, make_model, sgd, train
from tests.scenarios.driver import hvd


def the_mean_of_what_waited_is_kept() -> None:
    files = sorted(FOLDER.glob("*.pt"))
    assert files
    for file in files:
        saved = torch.load(file)
        model = make_model(seed=hvd.rank())
        optimizer = distribute(sgd(model, weight_decay=0.01), model, METHOD)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        found = 0
        for name, p in model.named_parameters():
            for key, x in optimizer.compression.store.state_of(p).items():
                mean = hvd.allreduce(x, name=f"{name}.{key}")
                torch.testing.assert_close(mean, saved["means"][f"{name}.{key}"])
                found += 1
        assert found == len(saved["means"]) > 10
        assert optimizer.compression.step == 6
        train(model, optimizer, range(6, 10))
        assert_same_everywhere(model)
