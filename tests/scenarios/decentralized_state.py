"""Training over a graph, in PyTorch: the state of each rank, and the average at the end."""

from __future__ import annotations

import copy

import numpy as np
import torch

from hvd_compress.errors import ConfigError
from tests.scenarios.common import assert_same_everywhere, loss_of, make_model, train
from tests.scenarios.decentralized import METHODS, RATE, distributed, points
from tests.scenarios.driver import hvd, raises


def checkpoints_of_each_rank_go_on_as_if_nothing_had_happened() -> None:
    for method in METHODS:
        model, other = make_model(), make_model(seed=1)
        optimizer = distributed(method, model)
        train(model, optimizer, range(4))
        saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
        train(model, optimizer, range(4, 7))
        other.load_state_dict(weights)
        again = distributed(method, other)
        again.load_state_dict(saved)
        train(other, again, range(4, 7))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), method


def a_checkpoint_of_another_rank_is_refused() -> None:
    model = make_model()
    optimizer = distributed(hvd.ExactDiffusion, model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    entry, rank, size = saved["training"], hvd.rank(), hvd.size()
    for change in ({"size": size + 1}, {"rank": (rank + 1) % (size + 1), "size": size + 1}):
        saved["training"] = {**entry, **change}
        before = copy.deepcopy(optimizer.state_dict())
        with raises(ConfigError, "average_parameters"):
            optimizer.load_state_dict(saved)
        now = optimizer.state_dict()
        assert now["training"]["step"] == before["training"]["step"]
        for name, x in before["training"]["state"]["correction"].items():
            assert torch.equal(x, now["training"]["state"]["correction"][name])
    # What the message says helps.
    del saved["training"]
    hvd.average_parameters(model.parameters())
    optimizer.load_state_dict(saved)
    assert optimizer.training.state == {}
    train(model, optimizer, range(2, 4))


def a_method_without_state_takes_any_ranks_checkpoint() -> None:
    model = make_model()
    optimizer = distributed(hvd.Diffusion, model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict() if hvd.rank() == 0 else None
    optimizer.load_state_dict(hvd.broadcast_object(saved, 0, name="checkpoint"))
    train(model, optimizer, range(2, 4))


def a_broadcast_lets_all_ranks_begin_anew() -> None:
    """And then an exact method is still exact."""
    best = points(0).mean(axis=0)
    for method in (hvd.ExactDiffusion, hvd.GradientTracking):
        x = torch.nn.Parameter(torch.tensor(points(1)[hvd.rank()]))
        target = torch.tensor(points(0)[hvd.rank()])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=RATE), method=method)
        for step in range(105):
            if step == 5:
                hvd.broadcast_parameters([("x", x)], 0)
                hvd.broadcast_optimizer_state(optimizer, 0)
                assert (optimizer.training.step, optimizer.training.state) == (5, {})
                assert_same_everywhere([x])
            optimizer.zero_grad()
            ((x - target) ** 2).sum().div(2).backward()
            optimizer.step()
        np.testing.assert_allclose(x.detach().numpy(), best, atol=2e-4)


def a_step_that_loss_scaling_skips_is_a_step() -> None:
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=2.0**4)
    optimizer = distributed(hvd.ExactDiffusion, model)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if step == 1 and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.training.step == step + 1
    assert scaler.get_scale() == (2.0**3 if hvd.rank() == 0 else 2.0**4)
    assert optimizer.training.exchanges == 4
    assert all(torch.isfinite(p).all() for p in model.parameters())


def parameters_that_are_frozen_become_the_average_and_begin_anew() -> None:
    model = make_model()
    for method in (
        hvd.ExactDiffusion("line"),
        hvd.GradientTracking("exponential"),
        hvd.LEAD("line"),
    ):
        optimizer = distributed(method, model)
        train(model, optimizer, range(2))
        frozen = model[0].weight
        frozen.requires_grad_(False)
        frozen.grad = None
        kept = frozen.detach().clone()
        hvd.average_parameters([kept])
        train(model, optimizer, range(2, 4))
        torch.testing.assert_close(frozen.detach(), kept)
        kept = frozen.detach().clone()
        assert all("0.weight" not in arrays for arrays in optimizer.training.state.values())
        frozen.requires_grad_(True)
        train(model, optimizer, range(4, 6))
        assert not torch.equal(frozen, kept)
        names = [name for name, _ in model.named_parameters()]
        assert all(list(arrays) == names for arrays in optimizer.training.state.values())
    for p in model.parameters():
        p.requires_grad_(False)
        p.grad = None
    optimizer.step()
    assert_same_everywhere(model)
    before = [p.clone() for p in model.parameters()]
    optimizer.step()  # with nothing to train there is nothing to do
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def the_average_of_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
    with torch.no_grad():
        for x in model.state_dict().values():
            x.fill_(hvd.rank())
    hvd.average_parameters(model.state_dict())
    mean = (hvd.size() - 1) / 2
    for name, x in model.state_dict().items():
        expected = hvd.size() - 1 if name.endswith("tracked") else mean
        assert (x == expected).all(), name
    assert_same_everywhere(model)
    z = torch.full((2,), complex(1.5, hvd.rank()))
    hvd.average_parameters([z])
    assert z.tolist() == [complex(1.5, mean)] * 2
    x = torch.full((3,), 1.0 + hvd.rank(), dtype=torch.bfloat16)
    hvd.average_parameters([x, torch.empty(0)])
    assert (x == torch.tensor(1 + mean, dtype=torch.bfloat16)).all()
    half = torch.nn.Linear(2, 2)
    hvd.average_parameters(half.named_parameters())
    assert_same_everywhere(half)
    for wrong in (x, 3, ["x"]):
        with raises(ConfigError, "model.state_dict"):
            hvd.average_parameters(wrong)


def the_tested_model_is_the_average() -> None:
    model = make_model()
    optimizer = distributed(hvd.Diffusion("line"), model)
    train(model, optimizer, range(3))
    own = [p.detach().clone() for p in model.parameters()]
    with optimizer.synchronized_parameters():
        assert_same_everywhere(model)
        averaged = [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(p, x) for p, x in zip(model.parameters(), own, strict=True))
    hvd.average_parameters(model.parameters())
    for p, x in zip(model.parameters(), averaged, strict=True):
        torch.testing.assert_close(p.detach(), x, rtol=1e-6, atol=1e-7)
