"""Data, a network, and what must hold of all training loops."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

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


def assert_same_everywhere(module):
    """The same parameters on all ranks, bit for bit."""
    mine = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    assert all(torch.equal(theirs, mine) for theirs in everyones)


def assert_equal(module, other):
    """The same parameters, bit for bit."""
    for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q), f"{name} differs by {(p - q).abs().max().item()}"


def assert_close(module, other):
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-4, atol=1e-5)


def assert_compressed(state, steps):
    """So many exchanges were made, of few bytes each, and residuals wait on each rank."""
    stats = state.stats()
    assert {layer.steps for layer in stats.layers.values()} == {steps}
    assert stats.total.ratio > 8
    assert stats.total.residual_norm > 0


def assert_same_states(state, other):
    """The same residuals and counters on this rank, bit for bit."""
    assert state.reducer.step == other.reducer.step
    ours, theirs = state.reducer.store.states, other.reducer.store.states
    assert ours.keys() == theirs.keys()
    for name, entries in ours.items():
        assert all(torch.equal(x, theirs[name][key]) for key, x in entries.items()), name
