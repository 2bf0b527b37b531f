"""1-bit Adam and 0/1 Adam: cases by hand, schedules, and the exchanges beside NumPy's formulas.

The optimizers themselves run in real jobs: ``scenarios/optimizers.py``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvd_compress import After, ConfigError, OneBitAdamCompression, ZeroOneAdamCompression
from hvd_compress.blocks import averaged_momentum, chain, error_feedback
from hvd_compress.engines.lockstep import World
from hvd_compress.errors import UnboundError
from hvd_compress.meetings import allreduce
from hvd_compress.torch import OneBitAdam, ZeroOneAdam
from tests.adam_reference import OneBitMean, variance_steps

WORKED = np.array([3.0, -4.0, 12.0])


@pytest.mark.parametrize(
    ("norm", "scale", "squared"),
    [("l1", 19 / 3, 169 - 361 / 3), ("l2", 13 / 3**0.5, 52.789)],
)
def test_the_worked_buffer(norm, scale, squared):
    """(3, -4, 12) as momentum of one rank, beta 0."""
    method = OneBitAdamCompression(0.0, 1, norm, min_size=0)
    world = World(method, 1)
    world.exchange([np.zeros(3)])
    [outcome] = world.exchange([WORKED])
    told = scale * np.array([1, -1, 1])
    np.testing.assert_allclose(outcome.direction, told, rtol=1e-12)
    np.testing.assert_allclose(outcome.state["average"], told, rtol=1e-12)
    np.testing.assert_allclose(outcome.state["residual"], WORKED - told, rtol=1e-12)
    np.testing.assert_array_equal(outcome.state["owner_residual"], 0)
    assert np.square(outcome.state["residual"]).sum() == pytest.approx(squared, abs=1e-3)


def test_two_steps_by_hand():
    """Two ranks, beta 1/2, frozen after one step; one element each, where a bit loses nothing."""
    world = World(OneBitAdamCompression(0.5, 1, min_size=0), 2)
    first = world.exchange([np.array([2.0]), np.array([4.0])])
    assert [o.direction.item() for o in first] == [3, 3]  # the gradient
    assert [o.state["average"].item() for o in first] == [1.5, 1.5]
    second = world.exchange([np.array([1.0]), np.array([-4.0])])
    # 0.75 + 0.5 and 0.75 - 2: their mean is the momentum of the mean gradient.
    assert [o.direction.item() for o in second] == [0, 0]
    assert [o.state["average"].item() for o in second] == [0, 0]


def test_without_loss_it_is_the_momentum_of_the_average():
    random = np.random.default_rng(0)
    world = World(chain(averaged_momentum(0.8, 3), via=allreduce()), 3)
    u = np.zeros(5)
    for step in range(8):
        gradients = random.normal(size=(3, 5))
        u = 0.8 * u + 0.2 * gradients.mean(0)
        [outcome, *_] = world.exchange(list(gradients))
        expected = gradients.mean(0) if step < 3 else u
        np.testing.assert_allclose(outcome.direction, expected, atol=1e-14)
        np.testing.assert_allclose(outcome.state["average"], u, atol=1e-14)


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_exchanges_follow_the_formulas(ranks, norm):
    random = np.random.default_rng(ranks)
    n, beta = 50, 0.9
    world = World(OneBitAdamCompression(beta, 4, norm, min_size=0), ranks)
    mean, u = OneBitMean(n, ranks, norm), np.zeros(n)
    for step in range(30):
        gradients = random.normal(size=(ranks, n))
        outcomes = world.exchange(list(gradients))
        if step < 4:
            u = beta * u + (1 - beta) * gradients.mean(0)
        else:
            u = mean([beta * u + (1 - beta) * g for g in gradients])
        np.testing.assert_allclose(outcomes[-1].state["average"], u, rtol=1e-9, atol=1e-12)
        residuals = [o.state["residual"] for o in outcomes]
        np.testing.assert_allclose(residuals, mean.worker_errors, rtol=1e-9, atol=1e-12)


def test_momentum_stands_before_error_feedback():
    with pytest.raises(ConfigError, match="averaged_momentum must stand before"):
        chain(error_feedback(), averaged_momentum(), via=allreduce())


@pytest.mark.parametrize("updates", [1, 2, 3, 16])
def test_variance_steps_are_those_of_a_counter(updates):
    method = ZeroOneAdamCompression(var_update_scaler=updates)
    steps = [s for s in range(1, 5001) if method.phase(s) == "variance"]
    assert steps == variance_steps(updates, 5000)


def test_synchronizations_by_hand():
    method = ZeroOneAdamCompression(4, 16, local_step_scaler=6, local_step_clipper=4)
    phases = [method.phase(s) for s in range(1, 37)]
    assert phases[:4] == ["variance"] * 4
    synchronized = [s for s, phase in enumerate(phases, 1) if phase == "sync"]
    assert synchronized == [5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 36]


def test_residuals_wait_while_gradients_are_summed():
    method = ZeroOneAdamCompression(var_update_scaler=1, min_size=0)  # variance steps 1, 2, 4, 8
    world = World(method, 2)
    random = np.random.default_rng(0)
    before = None
    for step in range(1, 9):
        gradients = random.normal(size=(2, 20))
        outcomes = world.exchange(list(gradients))
        residual = outcomes[0].state["residual"]
        if step in (1, 2, 4, 8):
            np.testing.assert_allclose(outcomes[0].mean, gradients.mean(0), atol=1e-15)
            assert before is None or np.array_equal(residual, before)
        else:
            assert np.abs(residual).max() > 0.1
        before = residual.copy()


def test_epochs_may_count():
    method = OneBitAdamCompression(freeze_step=After("epoch", 3))
    assert method.needs_epoch
    assert [method.frozen(1000, epoch) for epoch in (2, 3)] == [False, True]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: OneBitAdam(p, 0.05, weight_decay=0.1, freeze_step=100),
        lambda p: ZeroOneAdam(p, 0.05, weight_decay=0.1, var_update_scaler=100),
    ],
    ids=["1-bit", "0/1"],
)
def test_alone_and_before_the_freeze_they_are_adam(make):
    random = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(20, dtype=torch.float64)) for _ in range(2))
    optimizers = make([ours]), torch.optim.AdamW([theirs], 0.05, weight_decay=0.1)
    for _ in range(50):
        gradient = torch.randn(20, dtype=torch.float64, generator=random)
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_horovods_own_functions_cannot_use_it():
    with pytest.raises(UnboundError):
        OneBitAdamCompression.compress(None)
