"""Training methods in PyTorch: what is saved, frozen, scaled, averaged, and refused."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import numpy as np
import torch

from hvd_compress.errors import ConfigError, MismatchError, UnsupportedError
from hvd_compress.systems import rounds
from hvd_compress.systems.graphs import l1, simulate
from tests.scenarios import applies
from tests.scenarios.common import (
    assert_equal,
    assert_same_everywhere,
    goes_on_from_a_checkpoint,
    loss_of,
    make_model,
    sgd,
    train,
    train_scaled,
)
from tests.scenarios.driver import barrier, hvd, raises

GRAPHS = (
    *(hvd.Diffusion("line"), hvd.DGD("star"), hvd.EXTRA("cycle")),
    *(hvd.ExactDiffusion("line"), hvd.GradientTracking("exponential")),
    *(hvd.GradientTracking("one_peer"), hvd.GradientTracking("line")),
    *(hvd.LEAD("cycle"), hvd.LEAD("line", codec=None, prox=l1(0.01))),
    *(hvd.ExactDiffusion("line", prox=l1(0.01)), hvd.EXTRA("cycle", prox=l1(0.01))),
)
D, RATE = 7, 0.125  # a product with a power of two has no rounding
TOP_K = "topk:density=0.2"


def _distributed(method: Any, model: Any, inner: Any = None, **options: Any) -> Any:
    inner = sgd(model, nesterov=True) if inner is None else inner
    names = model.named_parameters()
    return hvd.DistributedOptimizer(inner, named_parameters=names, method=method, **options)


def _begin(method: Any, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    model = make_model(seed)
    return model, _distributed(method, model, **options)


def _train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        loss.backward()
        optimizer.report(loss)
        optimizer.step()


def _points(seed: int) -> np.ndarray:
    """One for each rank: with seed 0 the minima of their functions, with 1 where they begin."""
    return np.random.default_rng(seed).standard_normal((hvd.size(), D)).astype(np.float32)


def _quadratic(method: Any) -> tuple[torch.nn.Parameter, Any, Any]:
    """x, its optimizer, and a step along the gradient of |x - b_k|^2 / 2 on rank k."""
    x = torch.nn.Parameter(torch.tensor(_points(1)[hvd.rank()]))
    target = torch.tensor(_points(0)[hvd.rank()])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([x], lr=RATE), method=method)

    def step() -> None:
        optimizer.zero_grad()
        ((x - target) ** 2).sum().div(2).backward()
        optimizer.step()

    return x, optimizer, step


def every_graph_gives_the_bits_of_the_simulation() -> None:
    """The simulation is the functions for NumPy, whatever carries the messages."""
    targets, size = _points(0), hvd.size()
    w = torch.eye(size, dtype=torch.float64) / 2 + 1 / (2 * size)  # a matrix of one's own
    for method in (*GRAPHS, hvd.ExactDiffusion(w)):
        x, _, step = _quadratic(method)
        for _ in range(6):
            step()
        expected = simulate(method, lambda rank, x, _: x - targets[rank], _points(1), 6, RATE)
        np.testing.assert_array_equal(x.detach().numpy(), expected[hvd.rank()])


def a_broadcast_lets_all_ranks_begin_anew() -> None:
    """And then an exact method is still exact."""
    best = _points(0).mean(axis=0)
    for method in (hvd.ExactDiffusion, hvd.GradientTracking):
        x, optimizer, step = _quadratic(method)
        for number in range(105):
            if number == 5:
                hvd.broadcast_parameters([("x", x)], 0)
                hvd.broadcast_optimizer_state(optimizer, 0)
                assert (optimizer.training.step, optimizer.training.state) == (5, {})
                assert_same_everywhere([x])
            step()
        np.testing.assert_allclose(x.detach().numpy(), best, atol=2e-4)


def what_cannot_work_is_refused() -> None:
    model = make_model()
    for options, words in (
        ({"compression": "topk"}, ("compression", "method", "codec")),
        ({"compression": hvd.NoCompression}, ("compression", "method")),
        ({"backward_passes_per_step": 2}, ("backward_passes_per_step", "add up")),
        ({"op": hvd.Sum}, ("op=", "leave op out")),
        ({"groups": 2}, ("groups", "leave groups out")),
    ):
        with raises(ConfigError, *words):
            _distributed(hvd.Diffusion, model, **options)
    for method, *words in (
        ("exact_diffusion", "no training method", "ExactDiffusion"),
        (hvd.LARS, "no training method"),  # a class of another kind
        (hvd.Diffusion("grid:rows=7"), "rows=7"),
    ):
        with raises(ConfigError, *words):
            _distributed(method, model)
    with raises(UnsupportedError, "LBFGS"):
        _distributed(hvd.Diffusion, model, torch.optim.LBFGS(model.parameters()))
    with raises(ConfigError, "sync_every must be a whole number"):
        hvd.LocalSGD(sgd(model))
    if hvd.size() > 2:
        with raises(ConfigError, "undirected"):
            _distributed(hvd.LEAD("one_peer"), model)
    # Nothing was left behind: the same model can still be trained.
    optimizer = hvd.DistributedOptimizer(sgd(model), method=hvd.LocalSGD())
    for again in (
        lambda: hvd.DistributedOptimizer(optimizer, compression=hvd.TopK),
        lambda: hvd.DistributedOptimizer(optimizer, method=hvd.DiLoCo()),
    ):
        with raises(ConfigError, "distributed already"):
            again()
    _train(model, optimizer, range(1))


def a_variable_that_names_a_compression_is_for_gradients() -> None:
    model, before = make_model(), os.environ.get("HVD_COMPRESSION")
    os.environ["HVD_COMPRESSION"] = "topk"
    try:
        _train(model, _distributed(hvd.Diffusion, model), range(1))
    finally:
        del os.environ["HVD_COMPRESSION"]
        if before is not None:
            os.environ["HVD_COMPRESSION"] = before


def a_leader_is_chosen_by_loss() -> None:
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), method=hvd.LeaderSGD(local_every=2, global_every=4)
    )
    loss_of(model, hvd.rank(), 0).backward()
    with raises(ConfigError, "report"):
        optimizer.step()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def a_frozen_parameter_is_the_same_everywhere() -> None:
    """Frozen in the middle of a round, and of an exchange, and trained again later.  Its state is
    a matter of tests/systems/test_rounds.py."""
    for method in (
        rounds.DiLoCo(sync_every=4, delay=2),
        rounds.DiLoCo(sync_every=4, compression=TOP_K),
        rounds.EASGD(sync_every=4),
        hvd.LEAD("line"),
    ):
        model, optimizer = _begin(method)
        _train(model, optimizer, range(5))
        name, frozen = next(iter(model.named_parameters()))
        mean = hvd.allreduce(frozen.detach(), name="mean")
        state = optimizer.training.state
        expected = state["centre"][name].clone() if "centre" in state else mean
        frozen.requires_grad_(False)
        frozen.grad = None
        _train(model, optimizer, range(5, 9))
        torch.testing.assert_close(frozen.detach(), expected)
        assert_same_everywhere([frozen])
        frozen.requires_grad_(True)
        _train(model, optimizer, range(9, 12))
        assert not torch.allclose(frozen, expected), "it is trained"
        with optimizer.synchronized_parameters():
            assert_same_everywhere(model)


def without_trained_parameters_nothing_happens() -> None:
    """From the beginning; if only one rank has none, all say so."""
    for method in (rounds.DiLoCo(sync_every=4, fragments=2, delay=1), hvd.ExactDiffusion("cycle")):
        model = make_model().requires_grad_(False)
        before = [p.clone() for p in model.parameters()]
        optimizer = _distributed(method, model)
        for _ in range(5):
            optimizer.step()
        assert optimizer.training.step == 5
        assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))
        if hvd.size() > 1:
            model = make_model()
            if hvd.rank() == 1:
                model.requires_grad_(False)
            optimizer = _distributed(method, model)
            with raises(MismatchError, "parameters"):
                for _ in range(5):
                    optimizer.step()


def a_rank_without_gradients_meets_the_others() -> None:
    for method in (rounds.DiLoCo(sync_every=2), hvd.ExactDiffusion("complete")):
        (model, optimizer), fresh = _begin(method), make_model()
        for step in range(4):
            optimizer.zero_grad()
            if hvd.rank() == 0:
                loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
        pairs = zip(model.parameters(), fresh.parameters(), strict=True)
        assert not any(torch.equal(p, q) for p, q in pairs)
        if isinstance(method, rounds.DiLoCo):
            assert_same_everywhere(model)


def a_step_that_loss_scaling_skips_is_a_step() -> None:
    for method, exchanges in ((rounds.LocalSGD(sync_every=2), 2), (hvd.ExactDiffusion, 4)):
        (model, optimizer), scaler = _begin(method), torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for step in range(4):
            train_scaled(model, optimizer, scaler, [step], spoilt=[1])
            assert optimizer.training.step == step + 1
        assert scaler.get_scale() == (2.0**3 if hvd.rank() == 0 else 2.0**4)
        assert optimizer.training.exchanges == exchanges
        assert all(torch.isfinite(p).all() for p in model.parameters())


def checkpoints_of_each_rank_go_on_as_if_nothing_had_happened() -> None:
    streaming = rounds.DiLoCo(sync_every=6, fragments=2, delay=1, mix=0.5, compression=TOP_K)
    for method in (streaming, hvd.LEAD("cycle"), hvd.GradientTracking("one_peer")):
        goes_on_from_a_checkpoint(lambda seed, m=method: _begin(m, seed), 8, 7, _train)


def a_checkpoint_of_one_rank_serves_all() -> None:
    """Saved in the middle of an exchange, on rank 0, and loaded by all."""
    method = rounds.DiLoCo(sync_every=4, delay=2, compression=TOP_K)
    (model, optimizer), (other, again) = _begin(method), _begin(method, seed=1)
    _train(model, optimizer, range(8))
    with raises(ConfigError, "consolidate_state_dict"):
        optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.consolidate_state_dict()
        assert optimizer.state_dict()["training"]["state"]["arrived"]
        own = optimizer.state_dict() if hvd.rank() == 0 else None
        again.load_state_dict(hvd.broadcast_object(own, 0, name="checkpoint"))
    hvd.broadcast_optimizer_state(again, 0)
    hvd.broadcast_parameters(model.state_dict(), 0)
    other.load_state_dict(model.state_dict())
    assert again.training.step == 8
    _train(other, again, range(8, 14))
    assert_same_everywhere([other, *again.training.state["anchor"].values()][1:])


def a_checkpoint_of_another_rank_is_refused_if_it_has_a_state() -> None:
    model, optimizer = _begin(hvd.Diffusion)
    _train(model, optimizer, range(2))
    saved = optimizer.state_dict() if hvd.rank() == 0 else None
    optimizer.load_state_dict(hvd.broadcast_object(saved, 0, name="checkpoint"))
    optimizer = _distributed(hvd.ExactDiffusion, model)
    _train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    entry, rank, size = saved["training"], hvd.rank(), hvd.size()
    for change in ({"size": size + 1}, {"rank": (rank + 1) % (size + 1), "size": size + 1}):
        saved["training"] = {**entry, **change}
        before = copy.deepcopy(optimizer.state_dict())["training"]
        with raises(ConfigError, "synchronize_parameters"):
            optimizer.load_state_dict(saved)
        now = optimizer.state_dict()["training"]
        assert now["step"] == before["step"]
        for name, x in before["state"]["correction"].items():
            assert torch.equal(x, now["state"]["correction"][name])
    # What the message says helps.
    del saved["training"]
    optimizer.load_state_dict(saved)
    optimizer.synchronize_parameters()
    assert_same_everywhere(model)
    _train(model, optimizer, range(2, 4))


@applies(least=2)  # one rank agrees with itself
def ranks_that_begin_apart_can_still_be_made_equal() -> None:
    """Before the first exchange."""
    model = make_model(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(model, nesterov=True), method=hvd.DiLoCo(sync_every=2))
    _train(model, optimizer, range(1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    # The first round begins at the parameters of then.
    optimizer.load_state_dict(sgd(model, nesterov=True).state_dict())
    _train(model, optimizer, range(1, 6))
    assert_same_everywhere(model)


def types_of_parameters_may_be_mixed() -> None:
    rank, mean = float(hvd.rank()), (hvd.size() - 1) / 2
    model = torch.nn.ParameterDict(
        {
            "wide": torch.nn.Parameter(torch.ones(3, dtype=torch.float64) * rank),
            "narrow": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16) * rank),
            "empty": torch.nn.Parameter(torch.ones(0, 4)),
            "scalar": torch.nn.Parameter(torch.tensor(rank)),
        }
    )
    before = {name: (p.dtype, p.shape) for name, p in model.items()}
    inner = torch.optim.SGD(model.values(), 0.5)
    optimizer = _distributed(hvd.ExactDiffusion("complete"), model, inner)
    for _ in range(40):
        optimizer.zero_grad()
        sum(((p.float() - rank) ** 2).sum() / 2 for p in model.values()).backward()
        optimizer.step()
    assert {name: (p.dtype, p.shape) for name, p in model.items()} == before
    torch.testing.assert_close(model["wide"].detach(), torch.full((3,), mean).double())
    torch.testing.assert_close(model["scalar"].item(), mean)


@applies(least=3)
def ranks_of_a_set_have_a_graph_of_their_own() -> None:
    some = hvd.add_process_set([0, hvd.size() - 1])
    model, optimizer = _begin(hvd.Diffusion("complete"), process_set=some)
    _train(model, optimizer, range(2))
    if some.included():
        assert_same_everywhere(model, some)
    else:
        alone = make_model()
        train(alone, sgd(alone, nesterov=True), range(2))
        assert_equal(model, alone)
    barrier()
    hvd.remove_process_set(some)
