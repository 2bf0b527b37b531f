"""Data, a network, and what must hold of all training loops."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

from tests import group_worker
from tests.group_worker import states_of

METHOD = "topk:density=0.05"


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 10)
    )


def images(count: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Scans of digits, float32 of shape (count, 64), and their labels."""
    x, y = (torch.as_tensor(a[:count]) for a in load_digits(return_X_y=True))
    return x.float() / 16, y


def loss_of(model, x, y):
    return torch.nn.functional.cross_entropy(model(x), y)


def assert_compressed(state, steps):
    """So many exchanges were made, of few bytes each, and residuals wait on each rank."""
    stats = state.stats()
    assert {layer.steps for layer in stats.layers.values()} == {steps}
    assert stats.total.ratio > 8
    assert stats.total.residual_norm > 0


def assert_same_states(state, other):
    """The same residuals and counters on this rank, bit for bit."""
    assert state.reducer.step == other.reducer.step
    group_worker.assert_same_states(states_of(state), states_of(other))
