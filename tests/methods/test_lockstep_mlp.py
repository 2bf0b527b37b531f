"""The quick training of benchmarks/lockstep_mlp.py: its exchanges are those of a world of ranks."""

import numpy as np
import pytest
import torch

from benchmarks.lockstep_mlp import AtOnce, Exchange, Network, exchange
from hvd_compress import DGC, TopK, as_compressor
from hvd_compress.schedules import StagedWarmup

WIDTHS, RANKS = (40, 60, 30, 10), 3


def batch(random):
    x = random.standard_normal((RANKS, 8, WIDTHS[0]), np.float32)
    return x, random.integers(0, 10, (RANKS, 8))


def shapes_of(network):
    return {name: w.shape for name, w in network.weights.items()}


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize(
    "method",
    [
        "none",
        "dgc:density=0.01",
        "dgc:density=0.1,masking=false",
        DGC(density=StagedWarmup("step", 2)),
        "topk:density=0.01",
        TopK(density=StagedWarmup("epoch")),
    ],
)
def test_at_once_it_is_what_ranks_exchange(method, momentum):
    random, method = np.random.default_rng(0), as_compressor(method)
    network = Network(WIDTHS, random)
    quick = exchange(method, shapes_of(network), RANKS, momentum)
    ranks = Exchange(method, shapes_of(network), RANKS, momentum)
    assert isinstance(quick, AtOnce)
    for step in range(6):
        network.differentiate(*batch(random), quick.gradients)
        for name, x in quick.gradients.items():
            ranks.gradients[name][...] = x
        ours, theirs = quick(step / 2, step), ranks(step / 2, step)
        for name, direction in theirs.items():
            np.testing.assert_array_equal(ours[name], direction)
        network.step(ours, 0.1)
        sent = ranks.sent(step / 2, step)
        assert quick.sent(step / 2, step) == pytest.approx(sent, rel=0.1)


def test_other_options_go_through_the_ranks():
    shapes = {"weight": (60, 40)}
    for text in ("powersgd", "dgc:compact", "topk:values=float16", "dgc:min_size=0"):
        assert type(exchange(as_compressor(text), shapes, RANKS, 0.9)) is Exchange


def test_gradients_are_those_of_pytorch():
    random = np.random.default_rng(0)
    network = Network(WIDTHS, random)
    x, y = batch(random)
    found = {name: np.zeros((RANKS, *w.shape), np.float32) for name, w in network.weights.items()}
    network.differentiate(x, y, found)
    ws = {name: torch.tensor(w, requires_grad=True) for name, w in network.weights.items()}
    for rank in range(RANKS):
        z = torch.from_numpy(x[rank])
        for layer in range(3):
            z = torch.nn.functional.linear(z, ws[f"weight{layer}"], ws[f"bias{layer}"])
            z = z.relu() if layer < 2 else z
        loss = torch.nn.functional.cross_entropy(z, torch.from_numpy(y[rank]))
        expected = torch.autograd.grad(loss, list(ws.values()))
        for gradient, mine in zip(expected, found.values(), strict=True):
            np.testing.assert_allclose(mine[rank], gradient, atol=1e-6)
    score, tested = network.test(x[-1], y[-1])
    assert tested == pytest.approx(loss.item(), rel=1e-5)
    assert score == pytest.approx(100 * (z.argmax(1).numpy() == y[-1]).mean())
