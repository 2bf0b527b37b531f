"""0/1 Adam in PyTorch: what is saved, scaled, sparse, and refused."""

from __future__ import annotations

import copy
import warnings

import torch

from hvd_compress.errors import ConfigError
from tests.devices import DEVICE
from tests.scenarios.adam_zero_one import FREEZE, SCHEDULE, run_of
from tests.scenarios.common import distribute, make_model
from tests.scenarios.common import train as train_torch
from tests.scenarios.driver import assert_same_everywhere, hvd, raises, train

OPTIONS = {"lr": 0.01, **SCHEDULE}


def synchronizing_in_full_uses_up_the_residuals() -> None:
    run = run_of(local_step_scaler=1, local_step_clipper=1000)
    train(run, range(FREEZE + 2))  # 13 and 14 synchronize
    assert all("sync.residual" in s for s in run.optimizer.state.values())
    momentum = run.optimizer.state[run.model[0].weight]["exp_avg"].clone()
    run.optimizer.synchronize_parameters()  # nobody has moved, but something waits
    assert torch.equal(run.optimizer.state[run.model[0].weight]["exp_avg"], momentum)
    assert not any("sync.residual" in s for s in run.optimizer.state.values())
    assert_same_everywhere(run.weights())


def what_is_saved_after_a_synchronization_goes_on() -> None:
    runs = []
    model = make_model()
    adam = hvd.ZeroOneAdam(model.parameters(), **OPTIONS)
    optimizer = distribute(adam, model, adam.compressor(min_size=0))
    train_torch(model, optimizer, range(27))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.state_dict()
    assert any("optimizer.synchronize_parameters()" in str(w.message) for w in caught)
    optimizer.synchronize_parameters()
    optimizer.consolidate_state_dict()
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        again = make_model(seed=1)
        adam = hvd.ZeroOneAdam(again.parameters(), **OPTIONS)
        resumed = distribute(adam, again, adam.compressor(min_size=0))
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(state))
        train_torch(again, resumed, range(27, 33))
        resumed.synchronize_parameters()
        runs.append(again)
    train_torch(model, optimizer, range(27, 33))
    optimizer.synchronize_parameters()
    for other in runs:
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def loss_scaling_and_rows_end_with_the_freeze() -> None:
    run = train(run_of(make_options={"kind": "words"}), range(FREEZE))
    with raises(ConfigError, "sparse_as_dense"):
        train(run, [FREEZE])
    model = make_model()
    adam = hvd.ZeroOneAdam(model.parameters(), **{**OPTIONS, "var_freeze_step": 1})
    optimizer = distribute(adam, model, adam.compressor())
    scaler = torch.amp.GradScaler("cpu")
    for step in range(2):
        scaler.scale(model(torch.ones(1, 40, device=DEVICE)).sum()).backward()
        if step:
            with raises(ConfigError, "loss scaling"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
