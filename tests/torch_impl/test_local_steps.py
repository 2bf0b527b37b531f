"""Optimizers that train by a method, where one process shows it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import hvd_compress.torch.mpi as hvd
from tests.scenarios.common import loss_of, make_model, sgd

hvd.init()


def train(model, optimizer, steps, set_to_none=True):
    for step in steps:
        optimizer.zero_grad(set_to_none)
        loss_of(model, 0, step).backward()
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_frozen_parameter_stays_where_it_is(set_to_none):
    """Zeros, and the gradient of before, are gradients that momentum and decay step on."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model, weight_decay=0.1), method=hvd.LocalSGD(sync_every=4)
    )
    train(model, optimizer, range(3), set_to_none)
    frozen = model[0].weight.requires_grad_(False)
    before = frozen.detach().clone()
    train(model, optimizer, range(3, 6), set_to_none)
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    train(model, optimizer, range(6, 8), set_to_none)
    assert not torch.equal(frozen, before)


def test_a_parameter_may_be_frozen_behind_a_checkpoint():
    """It begins anew as one that is frozen at any other time."""
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), method=hvd.DiLoCo(sync_every=4))
    train(model, optimizer, range(3))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model[0].weight.requires_grad_(False)
    train(model, optimizer, range(3, 5))
    assert len(optimizer.training.state["anchor"]) == len(list(model.parameters())) - 1


@pytest.mark.parametrize("method", [hvd.LocalSGD, hvd.DiLoCo])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_checkpoint_of_another_model_is_refused(method, momentum):
    """Before the first step as well, when everything is loaded."""
    saved = []
    for width in (7, 9):
        model = torch.nn.Linear(4, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        optimizer = hvd.DistributedOptimizer(optimizer, method=method)
        if saved and (momentum or method is hvd.DiLoCo):
            with pytest.raises(hvd.ConfigError, match=r"nothing was changed.*shape \W7, 4\W"):
                optimizer.load_state_dict(saved[0])
            assert not optimizer.state
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        saved.append(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("damage", [7, {"momentum_buffer": "x"}])
def test_a_state_that_is_damaged_is_refused(damage):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), method=hvd.LocalSGD())
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1] = damage
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(hvd.ConfigError, match="nothing was changed"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    torch.testing.assert_close(after["state"], before["state"])


def test_local_steps_take_the_parameters_of_a_compressed_optimizer_over():
    """Its hooks would exchange gradients that nobody waits for."""
    model = make_model()
    compressed = hvd.DistributedOptimizer(sgd(model), compression="topk:density=0.1")
    loss_of(model, 0, 0).backward()
    with pytest.raises(hvd.ConfigError, match="under way"):
        hvd.DistributedOptimizer(sgd(model), method=hvd.LocalSGD())
    compressed.step()
    optimizer = hvd.DistributedOptimizer(sgd(model), method=hvd.LocalSGD())
    train(model, optimizer, range(3))
    assert compressed.compression.step == 1
    with pytest.raises(hvd.ConfigError, match="taken them over"):
        compressed.step()


@pytest.mark.parametrize("method", [{"method": hvd.LocalSGD}, {"compression": "topk"}])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_that_is_copied_says_what_to_do_instead(method, copied):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), **method)
    with pytest.raises(hvd.ConfigError, match="state_dict"):
        copied(optimizer)
    train(model, optimizer, range(2))
    copy.deepcopy(model)


def test_a_group_that_is_refused_is_not_added():
    model, more = make_model(), torch.nn.Linear(5, 5)
    optimizer = hvd.DistributedOptimizer(sgd(model), method=hvd.EASGD())
    with pytest.raises(hvd.UnsupportedError, match="on the device meta"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.empty(3, device="meta"))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": more.parameters()})
