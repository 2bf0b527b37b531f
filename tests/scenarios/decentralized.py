"""Training over a graph, in PyTorch: every rank meets its neighbours only."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from hvd_compress import systems
from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.systems import graphs
from hvd_compress.systems.graphs import LEAD, blockwise, l1, simulate
from tests.scenarios import applies
from tests.scenarios.common import LR, assert_same_everywhere, loss_of, make_model, sgd, train
from tests.scenarios.driver import barrier, hvd, raises

METHODS = (
    *(hvd.Diffusion("line"), hvd.DGD("star"), hvd.EXTRA("cycle")),
    *(hvd.ExactDiffusion("line"), hvd.GradientTracking("exponential")),
    *(hvd.GradientTracking("one_peer"), hvd.GradientTracking("line")),
    *(hvd.ChocoSGD("line"), hvd.LEAD("cycle"), hvd.LEAD("line", codec=None, prox=l1(0.01))),
    *(hvd.ExactDiffusion("line", prox=l1(0.01)), hvd.EXTRA("cycle", prox=l1(0.01))),
)
D, RATE = 7, 0.125  # a product with a power of two has no rounding


def distributed(method: Any, model: Any, inner: Any = None, **options: Any) -> Any:
    inner = sgd(model, nesterov=True) if inner is None else inner
    names = model.named_parameters()
    return hvd.DistributedOptimizer(inner, named_parameters=names, method=method, **options)


def _quadratics(method: Any, steps: int, before: Any = None) -> tuple[torch.Tensor, Any]:
    """Minimise |x - b_k|^2 / 2 on rank k by SGD, from points that differ."""
    x = torch.nn.Parameter(torch.tensor(points(1)[hvd.rank()]))
    target = torch.tensor(points(0)[hvd.rank()])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=RATE), method=method)
    for step in range(steps):
        optimizer.zero_grad()
        ((x - target) ** 2).sum().div(2).backward()
        if before is not None:
            before(step, x)
        optimizer.step()
    return x.detach(), optimizer


def points(seed: int) -> np.ndarray:
    """One for each rank: with seed 0 the minima of their functions, with 1 where they begin."""
    return np.random.default_rng(seed).standard_normal((hvd.size(), D)).astype(np.float32)


def every_method_gives_the_bits_of_the_simulation() -> None:
    """Of the functions for NumPy, whatever carries the messages."""
    targets = points(0)

    def gradient(rank: int, x: np.ndarray, step: int) -> np.ndarray:
        return x - targets[rank]

    size = hvd.size()
    w = torch.eye(size, dtype=torch.float64) / 2 + 1 / (2 * size)  # a matrix of one's own
    for method in (*METHODS, hvd.ExactDiffusion(w)):
        found, _ = _quadratics(method, 6)
        expected = simulate(method, gradient, points(1), 6, RATE)[hvd.rank()]
        np.testing.assert_array_equal(found.numpy(), expected)


def exact_methods_reach_the_minimum_of_all() -> None:
    best = points(0).mean(axis=0)
    for method in (hvd.ExactDiffusion, hvd.LEAD(codec=blockwise(2))):
        found, _ = _quadratics(method, 100)
        np.testing.assert_allclose(found.numpy(), best, atol=2e-4)  # rounding adds up in LEAD
    biased, _ = _quadratics(hvd.Diffusion("line"), 100)
    if hvd.size() > 2 and hvd.rank() == 0:  # two ranks average exactly
        assert abs(biased.numpy() - best).max() > 1e-2


def _models_of_all_ranks(method: Any, steps: int, make: Any) -> list[Any]:
    """Trained in this process by plain optimizers and the world of the training methods."""
    world = systems.Ranks(method, hvd.size())
    models = [make_model() for _ in range(hvd.size())]
    optimizers = [make(model) for model in models]
    rates = {name: LR for name, _ in models[0].named_parameters()}

    @torch.no_grad()
    def moved(function: Any, **known: Any) -> None:
        before = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in models]
        for model, after in zip(models, function(before, **known), strict=True):
            for name, p in model.named_parameters():
                p.copy_(after[name])

    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
        moved(world.before_step, rates=rates)
        for optimizer in optimizers:
            optimizer.step()
        moved(world.after_step)
    return models


def networks_and_momentum_follow_the_lockstep_world() -> None:
    """The step of the local optimizer is what takes the place of the gradient."""
    makers = (
        lambda model: sgd(model, nesterov=True, weight_decay=0.01),
        lambda model: torch.optim.AdamW(model.parameters(), LR),
    )
    for method in (hvd.ExactDiffusion("line"), hvd.LEAD("cycle"), hvd.GradientTracking("one_peer")):
        for make in makers:
            model = make_model()
            train(model, distributed(method, model, make(model)), range(5))
            expected = _models_of_all_ranks(method, 5, make)[hvd.rank()]
            for p, q in zip(model.parameters(), expected.parameters(), strict=True):
                assert torch.equal(p, q), method


def both_ways_to_write_it_are_one() -> None:
    models = [make_model(), make_model()]
    named = [model.named_parameters() for model in models]
    one = hvd.DistributedOptimizer(
        sgd(models[0]), method=hvd.EXTRA("line"), named_parameters=named[0]
    )
    other = hvd.local_steps(sgd(models[1]), hvd.EXTRA("line"), named_parameters=named[1])
    for model, optimizer in zip(models, (one, other), strict=True):
        assert isinstance(optimizer, torch.optim.SGD)
        train(model, optimizer, range(3))
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(p, q)


def options_of_gradients_are_refused() -> None:
    model = make_model()
    for options, words in (
        ({"compression": "topk"}, ("compression", "method", "codec")),
        ({"compression": hvd.NoCompression}, ("compression", "method")),
        ({"backward_passes_per_step": 2}, ("backward_passes_per_step", "add up")),
        ({"op": hvd.Sum}, ("op=", "leave op out")),
        ({"groups": 2}, ("groups", "leave groups out")),
    ):
        with raises(ConfigError, *words):
            distributed(hvd.Diffusion, model, **options)
    with raises(ConfigError, "no training method", "ExactDiffusion"):
        distributed("exact_diffusion", model)
    with raises(ConfigError, "no training method"):
        distributed(hvd.LARS, model)  # a class of another kind
    with raises(UnsupportedError, "LBFGS"):
        distributed(hvd.Diffusion, model, torch.optim.LBFGS(model.parameters()))
    with raises(ConfigError, "rows=7"):
        distributed(hvd.Diffusion("grid:rows=7"), model)
    if hvd.size() > 2:
        with raises(ConfigError, "undirected"):
            distributed(hvd.LEAD("one_peer"), model)
    # Nothing was left behind: the same model can still be trained.
    train(model, distributed(hvd.Diffusion, model), range(1))


def a_variable_that_names_a_compression_is_for_gradients() -> None:
    model, before = make_model(), os.environ.get("HVD_COMPRESSION")
    os.environ["HVD_COMPRESSION"] = "topk"
    try:
        train(model, distributed(hvd.Diffusion, model), range(1))
    finally:
        del os.environ["HVD_COMPRESSION"]
        if before is not None:
            os.environ["HVD_COMPRESSION"] = before


def bytes_go_to_neighbours_only() -> None:
    """A header of 16 bytes and the parameters, padded to 8, for each neighbour; twice as many for
    tracking, and about 2.4 bits an element for LEAD."""
    model = make_model()
    whole = 4 * sum(p.numel() for p in model.parameters())
    for topology in ("line", "cycle", "star", "one_peer"):
        for method, vectors in (
            (hvd.Diffusion(topology), 1),
            (hvd.GradientTracking(topology), 2),
        ):
            optimizer = distributed(method, model)
            train(model, optimizer, range(2))
            found = optimizer.training.stats().total
            steps = [method.network(hvd.rank(), hvd.size(), step) for step in (1, 2)]
            frame = (16 + vectors * whole + 7) // 8 * 8
            assert found.bytes_sent == sum(len(s.targets) for s in steps) * frame
            assert found.bytes_received == sum(len(s.sources) for s in steps) * frame
    optimizer = distributed(hvd.LEAD("line"), model)
    train(model, optimizer, range(1))
    neighbours = len(optimizer.training.method.network(hvd.rank(), hvd.size(), 1).targets)
    assert optimizer.training.stats().total.bytes_sent <= neighbours * (0.08 * whole + 64)


@applies(least=2)  # one rank agrees with itself
def ranks_that_differ_say_so() -> None:
    model = make_model()
    method = hvd.ExactDiffusion("line" if hvd.rank() else "star")
    with raises(MismatchError, "training", "Star"):
        train(model, distributed(method, model), range(2))


def a_nan_reaches_the_neighbours_and_then_all() -> None:
    """Nobody hangs, and nobody has it before a message brought it."""

    def spoil(step: int, x: torch.nn.Parameter) -> None:
        if step == 1 and hvd.rank() == 0:
            assert x.grad is not None
            x.grad.fill_(float("nan"))

    for method in (hvd.Diffusion("line"), hvd.ExactDiffusion("line"), hvd.LEAD("line")):
        early, _ = _quadratics(method, 2, spoil)
        assert torch.isnan(early).any() == (hvd.rank() <= 1), method
        late, _ = _quadratics(method, 2 + hvd.size(), spoil)
        assert torch.isnan(late).any(), method


def a_rank_without_gradients_mixes() -> None:
    model = make_model()
    optimizer = distributed(hvd.ExactDiffusion("line"), model)
    for step in range(4):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            loss_of(model, 0, step).backward()
        optimizer.step()
    fresh = make_model()
    pairs = zip(model.parameters(), fresh.parameters(), strict=True)
    assert not any(torch.equal(p, q) for p, q in pairs)


def types_of_parameters_may_be_mixed() -> None:
    model = torch.nn.ParameterDict(
        {
            "wide": torch.nn.Parameter(torch.ones(3, dtype=torch.float64) * hvd.rank()),
            "narrow": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16) * hvd.rank()),
            "empty": torch.nn.Parameter(torch.ones(0, 4)),
            "scalar": torch.nn.Parameter(torch.tensor(float(hvd.rank()))),
        }
    )
    before = {name: (p.dtype, p.shape) for name, p in model.items()}
    inner = torch.optim.SGD(model.values(), 0.5)
    optimizer = distributed(hvd.ExactDiffusion("complete"), model, inner)
    for _ in range(40):
        optimizer.zero_grad()
        sum(((p.float() - hvd.rank()) ** 2).sum() / 2 for p in model.values()).backward()
        optimizer.step()
    assert {name: (p.dtype, p.shape) for name, p in model.items()} == before
    mean = (hvd.size() - 1) / 2
    torch.testing.assert_close(model["wide"].detach(), torch.full((3,), mean).double())
    torch.testing.assert_close(model["scalar"].item(), mean)


@applies(least=3)
def ranks_of_a_set_have_a_graph_of_their_own() -> None:
    some = hvd.add_process_set([0, hvd.size() - 1])
    model = make_model()
    optimizer = distributed(hvd.Diffusion("complete"), model, process_set=some)
    train(model, optimizer, range(2))
    if some.included():
        assert_same_everywhere(model, some)
    else:
        alone = make_model()
        train(alone, sgd(alone, nesterov=True), range(2))
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p, q)
    hvd.average_parameters(model.parameters(), process_set=some)
    barrier()
    hvd.remove_process_set(some)


def methods_are_those_of_the_numpy_package() -> None:
    for name in ("Diffusion", "ExactDiffusion", "EXTRA", "ChocoSGD", "GradientTracking"):
        assert getattr(hvd, name) is getattr(graphs, name)
    assert hvd.LEAD is LEAD
