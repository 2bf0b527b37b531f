"""Measures of models: a quadratic whose answer is known, and networks that change in known ways."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from hvd_compress.errors import ConfigError, UnsupportedError
from hvd_compress.torch.studies import measures

EXACT = {"tolerance": 0.0, "steps": 20, "eps": 0.0}


def quadratic():
    w = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    h, c = torch.tensor([4.0, 1.0]), torch.tensor([1.0, 2.0])

    def loss():
        return (h * (w - c).square()).sum() / 2

    return w, loss


@pytest.mark.parametrize(("relative", "expected"), [(False, 0.2), (True, 0.158114)])
def test_the_quadratic(relative, expected):
    w, loss = quadratic()

    def risk():
        return loss().item()

    alpha = measures.adversarial_radius([w], risk, loss, relative=relative, **EXACT)
    assert alpha == pytest.approx(expected, abs=1e-5)
    assert 1 / alpha**2 == pytest.approx(40 if relative else 25, rel=1e-3)
    sigma = measures.noise_scale([w], risk, relative=relative, draws=2000, **EXACT)
    assert sigma == pytest.approx(expected, rel=0.03)
    assert w.tolist() == [1.0, 2.0]


def test_an_error_leaves_the_weights():
    w, _ = quadratic()
    calls = iter([0.0])
    with pytest.raises(StopIteration):
        measures.noise_scale([w], lambda: next(calls))
    assert w.tolist() == [1.0, 2.0]
    with pytest.raises(ConfigError, match="draws must be 1 or more"):
        measures.noise_scale([w], lambda: 0.0, draws=0)


def relu_network(bias=False):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 7, bias=bias), nn.ReLU(), nn.Linear(7, 6, bias=bias), nn.ReLU(),
        nn.Linear(6, 3, bias=bias),
    )  # fmt: skip


def test_path_norm_by_products_of_matrices():
    model = relu_network(bias=True)
    product = torch.ones(5)
    for i in (0, 2, 4):
        product = model[i].weight.square() @ product
    found = measures.path_norm(model, torch.randn(4, 5))
    assert found == pytest.approx(product.sum().item(), rel=1e-5)


def test_fisher_rao_of_relu_networks():
    """<w, dl/dw> = depth <f, dl/df>, since f is homogeneous of each layer's weights."""
    model, x, y = relu_network(), torch.randn(9, 5), torch.arange(9) % 3
    logits = model(x).detach().requires_grad_()
    losses = nn.functional.cross_entropy(logits, y, reduction="sum")
    [slope] = torch.autograd.grad(losses, logits)
    expected = (3 * (slope * logits).sum(1)).square().mean().item()
    assert measures.fisher_rao(model, x, y) == pytest.approx(expected, rel=1e-4)


def test_margins_and_entropy_by_hand():
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 4.0, 5.0]])
    assert measures.margins(logits, torch.tensor([0, 1])).tolist() == [1.0, -1.0]
    assert measures.entropy(torch.zeros(2, 4)) == pytest.approx(np.log(4))


def with_norm():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    for _ in range(5):
        model(3 + 2 * torch.randn(16, 1, 6, 6))
    return model


def test_folding_changes_nothing_but_the_weights():
    model, x = with_norm(), torch.randn(8, 1, 6, 6)
    net = measures.folded(model)
    torch.testing.assert_close(net(x), model.eval()(x), rtol=1e-4, atol=1e-5)
    assert set(measures.weights_of(net)) == {"0.weight", "4.weight", "7.weight"}
    assert any(isinstance(m, nn.BatchNorm2d) for m in model)
    with pytest.raises(UnsupportedError, match="right after its layer"):
        measures.folded(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)))


def test_spectral_norm_is_the_largest_singular_value():
    w = torch.randn(4, 3, 2, 2)
    expected = np.linalg.svd(w.reshape(4, -1).numpy(), compute_uv=False)[0]
    assert measures.spectral_norms({"w": w}) == pytest.approx([expected], rel=1e-5)


def test_all_of_a_network():
    initial = with_norm()
    model = copy.deepcopy(initial)
    x, y = torch.randn(60, 1, 6, 6), torch.arange(60) % 3
    x += y[:, None, None, None]
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    before = copy.deepcopy(model.state_dict())
    found = measures.take_all(model, initial, x, y)
    assert len(found) == 20
    assert all(np.isfinite(value) for value in found.values())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert found == measures.take_all(model, initial, x, y), "the same noise every time"
    net = measures.folded(model)
    weights = list(measures.weights_of(net).values())
    norm = sum(w.square().sum().item() for w in weights)
    assert found["param-norm"] == pytest.approx((norm / 60) ** 0.5, rel=1e-5)
    assert found["params"] == pytest.approx((sum(w.numel() for w in weights) / 60) ** 0.5)
    # The worst step in a box is worse than the mean of noise of that size.
    assert found["sharpness-flatness"] > found["pacbayes-flatness"]
    same = measures.take_all(model, model, x, y)
    assert same["frob-distance"] == 0
