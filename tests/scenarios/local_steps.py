"""Training with local steps between exchanges, in PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch

from hvd_compress import systems
from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.systems import rounds
from tests.scenarios import applies
from tests.scenarios.common import (
    LR,
    assert_same_everywhere,
    loss_of,
    make_model,
    sgd,
    train,
)
from tests.scenarios.driver import hvd, over, raises

NESTEROV = {"nesterov": True, "momentum": 0.9}


def _wrapped(method: systems.TrainingMethod, model: Any, inner: Any = None, **options: Any) -> Any:
    inner = sgd(model, **NESTEROV) if inner is None else inner
    return hvd.local_steps(inner, method, named_parameters=model.named_parameters(), **options)


def _through(method: Any, model: Any) -> Any:
    """``DistributedOptimizer(method=...)``, which is the same door."""
    inner = sgd(model, **NESTEROV)
    return hvd.DistributedOptimizer(inner, model.named_parameters(), method=method)


def _reference(method: systems.TrainingMethod, steps: int, make: Callable[..., Any]) -> list[Any]:
    """The models of all ranks, trained in this process by plain optimizers and the lockstep
    world."""
    world = systems.Ranks(method, hvd.size())
    models = [make_model() for _ in range(hvd.size())]
    optimizers = [make(model) for model in models]

    @torch.no_grad()
    def moved(function: Callable[..., Any], **known: Any) -> None:
        before = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in models]
        for model, after in zip(models, function(before, **known), strict=True):
            for name, p in model.named_parameters():
                p.copy_(after[name])

    for step in range(steps):
        losses = []
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            losses.append(loss.item())
        known = {"losses": losses, "rates": {n: LR for n, _ in models[0].named_parameters()}}
        moved(world.before_step, **known)
        for optimizer in optimizers:
            optimizer.step()
        moved(world.after_step)
    return models


def _train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        loss.backward()
        optimizer.report(loss)
        optimizer.step()


def _assert_follows(method: systems.TrainingMethod, steps: int, make: Any) -> Any:
    model = make_model()
    optimizer = _wrapped(method, model, make(model))
    _train(model, optimizer, range(steps))
    expected = _reference(method, steps, make)[hvd.rank()]
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        if over == "mpi":
            assert torch.equal(p, q), (method, name)
        else:
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=f"{method}, {name}")
    return optimizer


def local_steps_follow_the_lockstep_world() -> None:
    for method in (
        rounds.LocalSGD(sync_every=3, start=2),
        rounds.LocalSGD(sync_every=2, compression="topk:density=0.1"),
        rounds.SlowMo(sync_every=3),
        rounds.DiLoCo(sync_every=3),
    ):
        optimizer = _assert_follows(method, 9, lambda model: sgd(model, **NESTEROV))
        assert optimizer.training.exchanges < 9


def streaming_diloco_follows_the_lockstep_world() -> None:
    for options in ({}, {"delay": 1, "mix": 0.5}, {"delay": 2, "compression": "dgc:density=0.1"}):
        method = rounds.DiLoCo(sync_every=6, fragments=2, **options)
        _assert_follows(method, 14, lambda model: torch.optim.AdamW(model.parameters(), LR))


def leaders_and_centres_follow_the_lockstep_world() -> None:
    leaders = {"local_every": 2, "global_every": 4}
    for method in (
        rounds.LeaderSGD(**leaders),
        rounds.LeaderSGD(**leaders, groups=2, average_over=3),
        rounds.EASGD(sync_every=2),
        rounds.EASGD(sync_every=2, compression="topk:density=0.2"),
    ):
        _assert_follows(method, 9, lambda model: sgd(model, **NESTEROV))


def a_centre_is_the_same_everywhere_and_is_what_is_tested() -> None:
    model = make_model()
    optimizer = hvd.EASGD(sgd(model), sync_every=2)
    _train(model, optimizer, range(5))
    centre = list(optimizer.training.state["centre"].values())
    assert_same_everywhere(centre)
    optimizer.synchronize_parameters()
    assert all(torch.equal(p, c) for p, c in zip(model.parameters(), centre, strict=True))


def a_leader_is_chosen_by_loss() -> None:
    model = make_model()
    optimizer = hvd.LeaderSGD(sgd(model), local_every=2, global_every=4)
    loss_of(model, hvd.rank(), 0).backward()
    with raises(ConfigError, "report"):
        optimizer.step()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def only_the_leader_sends_parameters() -> None:
    model = make_model()
    optimizer = hvd.LeaderSGD(
        sgd(model), local_every=1, global_every=1, local_pull=0, local_drift=0
    )
    loss_of(model, hvd.rank(), 0).backward()
    optimizer.report(float(hvd.rank()))  # rank 0 leads
    optimizer.step()
    total = optimizer.training.stats().total
    whole = 4 * sum(p.numel() for p in model.parameters())
    from_leader = (whole, 0) if hvd.rank() == 0 else (0, whole)
    assert total.bytes_sent == 32 + from_leader[0]
    assert total.bytes_received == 32 * (hvd.size() - 1) + from_leader[1]


def ranks_are_equal_after_a_round() -> None:
    for compression in ("none", "topk:density=0.1", "powersgd:rank=1"):
        model = make_model()
        optimizer = hvd.DiLoCo(
            torch.optim.AdamW(model.parameters(), 1e-2),
            sync_every=4,
            compression=compression,
            named_parameters=model.named_parameters(),
        )
        assert isinstance(optimizer, torch.optim.AdamW)
        _train(model, optimizer, range(8))
        assert_same_everywhere(model)
        stats = optimizer.training.stats().total
        assert stats.steps == optimizer.training.exchanges == 2
        assert compression == "none" or stats.ratio > 3 or hvd.size() == 1


@applies(least=2)  # one rank agrees with itself
def ranks_that_differ_say_so() -> None:
    odd = hvd.rank() == 1
    with raises(MismatchError, "training", "sync_every=3"):
        model = make_model()
        optimizer = hvd.LocalSGD(sgd(model), sync_every=3 if odd else 2)
        _train(model, optimizer, range(3))


def momentum_may_be_averaged_or_reset() -> None:
    for buffers in ("average", "reset", "keep"):
        model = make_model()
        optimizer = hvd.LocalSGD(sgd(model), sync_every=2, buffers=buffers)
        _train(model, optimizer, range(4))
        found = [optimizer.state.get(p, {}).get("momentum_buffer") for p in model.parameters()]
        assert_same_everywhere(model)
        if buffers == "reset":
            assert found == [None] * len(found)
        elif buffers == "average":
            assert_same_everywhere(found)
        elif hvd.size() > 1:
            with raises(AssertionError, "diverged"):
                assert_same_everywhere(found)


def a_frozen_parameter_is_the_same_everywhere_and_begins_anew() -> None:
    """Frozen in the middle of a round, and of an exchange, and trained again later."""
    for method in (
        rounds.LocalSGD(sync_every=4),
        rounds.DiLoCo(sync_every=4, delay=2),
        rounds.DiLoCo(sync_every=4, compression="topk:density=0.2"),
        rounds.EASGD(sync_every=4),
    ):
        model = make_model()
        optimizer = _wrapped(method, model)
        _train(model, optimizer, range(5))
        name, frozen = next(iter(model.named_parameters()))
        mean = hvd.allreduce(frozen.detach(), name="mean")
        state = optimizer.training.state
        expected = state["centre"][name].clone() if "centre" in state else mean
        frozen.requires_grad_(False)
        exchanges = optimizer.training.exchanges
        _train(model, optimizer, range(5, 9))
        torch.testing.assert_close(frozen.detach(), expected)
        assert_same_everywhere([frozen])
        assert optimizer.training.exchanges == exchanges + 1, "freezing is no step"
        assert all(name not in arrays for arrays in optimizer.training.state.values())
        with torch.no_grad():
            frozen.fill_(0.25)  # an old anchor would pull it back
        frozen.requires_grad_(True)
        optimizer.training.before_step({n: p.detach() for n, p in model.named_parameters()})
        for key in {"anchor", "centre"} & optimizer.training.state.keys():
            assert (optimizer.training.state[key][name] == 0.25).all(), "from where it is"
        _train(model, optimizer, range(9, 12))
        own = frozen.detach().clone()
        with optimizer.synchronized_parameters():
            assert_same_everywhere(model)
        assert torch.equal(frozen, own)
        assert not (own == 0.25).all(), "it is trained"


def what_is_tested_is_no_exchange_of_training() -> None:
    model = make_model()
    optimizer = hvd.LocalSGD(sgd(model), sync_every=2)
    _train(model, optimizer, range(3))
    found = optimizer.training.exchanges, optimizer.training.stats().total
    optimizer.synchronize_parameters()
    after = optimizer.training.exchanges, optimizer.training.stats().total
    assert found[0] == after[0] == 1
    whole = 4 * sum(p.numel() for p in model.parameters())
    assert after[1].bytes_sent == found[1].bytes_sent + whole
    assert after[1].steps == found[1].steps


def a_step_that_loss_scaling_skips_is_a_step() -> None:
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=2.0**4)
    optimizer = hvd.LocalSGD(sgd(model), sync_every=2)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        if step == 1 and hvd.rank() == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.training.step == step + 1
        if step == 1 and hvd.size() == 1:
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert scaler.get_scale() == (2.0**3 if hvd.rank() == 0 else 2.0**4)
    assert optimizer.training.exchanges == 2
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert_same_everywhere(model)


def a_rank_without_gradients_meets_the_others() -> None:
    model = make_model()
    optimizer = hvd.DiLoCo(sgd(model), sync_every=2)
    for step in range(4):
        optimizer.zero_grad()
        if hvd.rank() == 0 or step % 2:
            loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
    assert_same_everywhere(model)


def checkpoints_go_on_as_if_nothing_had_happened() -> None:
    """Every rank's own state."""
    method = rounds.DiLoCo(
        sync_every=6, fragments=2, delay=1, mix=0.5, compression="topk:density=0.2"
    )
    model, other = make_model(), make_model(seed=1)
    optimizer = _wrapped(method, model)
    _train(model, optimizer, range(8))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {key: x.clone() for key, x in model.state_dict().items()}
    _train(model, optimizer, range(8, 15))
    other.load_state_dict(weights)
    again = _wrapped(method, other)
    again.load_state_dict(saved)
    _train(other, again, range(8, 15))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def a_checkpoint_of_one_rank_serves_all() -> None:
    """Saved in the middle of an exchange, on rank 0, and loaded by all."""
    method = rounds.DiLoCo(sync_every=4, delay=2, compression="topk:density=0.2")
    model, other = make_model(), make_model(seed=1)
    optimizer = _wrapped(method, model)
    _train(model, optimizer, range(9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.consolidate_state_dict()
    again = _wrapped(method, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own = optimizer.state_dict() if hvd.rank() == 0 else None
        again.load_state_dict(hvd.broadcast_object(own, 0, name="checkpoint"))
    hvd.broadcast_optimizer_state(again, 0)
    hvd.broadcast_parameters(model.state_dict(), 0)
    other.load_state_dict(model.state_dict())
    assert again.training.step == 9
    _train(other, again, range(9, 14))
    assert_same_everywhere([other, *again.training.state["anchor"].values()][1:])


def a_checkpoint_is_not_saved_in_the_middle_of_an_exchange() -> None:
    model = make_model()
    optimizer = _wrapped(rounds.DiLoCo(sync_every=4, delay=2), model)
    _train(model, optimizer, range(4))
    with raises(ConfigError, "consolidate_state_dict"):
        optimizer.state_dict()
    optimizer.consolidate_state_dict()
    assert optimizer.state_dict()["training"]["arrived"]
    _train(model, optimizer, range(4, 6))
    assert_same_everywhere(model)


def the_tested_model_is_the_average() -> None:
    model = make_model()
    optimizer = hvd.LocalSGD(sgd(model), sync_every=100)
    _train(model, optimizer, range(3))
    own = [p.detach().clone() for p in model.parameters()]
    with optimizer.synchronized_parameters():
        assert_same_everywhere(model)
        for p, x in zip(model.parameters(), own, strict=True):
            mean = hvd.allreduce(x, name="own")
            torch.testing.assert_close(p.detach(), mean, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, x) for p, x in zip(model.parameters(), own, strict=True))
    optimizer.synchronize_parameters()
    assert_same_everywhere(model)


def statistics_of_batch_norm_are_those_of_all_data() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = hvd.LocalSGD(torch.optim.SGD(model.parameters(), 0.1))
    everything = [
        torch.randn(4, 3, generator=torch.Generator().manual_seed(r)) + r for r in range(9)
    ]
    mine = everything[hvd.rank()]
    optimizer.update_batch_norm(model, [mine])
    used = torch.stack(everything[: hvd.size()])
    torch.testing.assert_close(model[0].running_mean, used.flatten(0, 1).mean(0))
    spread = used.mean(1).var(0, unbiased=False)
    torch.testing.assert_close(model[0].running_var, used.var(1).mean(0) + spread)
    assert_same_everywhere([model[0].running_mean, model[0].running_var])


def methods_of_both_doors_are_the_same() -> None:
    found = []
    for make in (
        lambda model: hvd.LocalSGD(sgd(model, **NESTEROV), sync_every=2),
        lambda model: _through(hvd.LocalSGD(sync_every=2), model),
        lambda model: _through(hvd.DiLoCo, model),
        lambda model: hvd.local_steps(sgd(model, **NESTEROV), hvd.DiLoCo),
    ):
        model = make_model()
        optimizer = make(model)
        _train(model, optimizer, range(3))
        found.append([optimizer.training.method, *(p.detach() for p in model.parameters())])
    assert found[1][0] == rounds.LocalSGD(sync_every=2)
    assert found[3][0] == rounds.DiLoCo()
    for one, other in (found[:2], found[2:]):
        assert one[0] == other[0]
        assert all(torch.equal(p, q) for p, q in zip(one[1:], other[1:], strict=True))
    with raises(ConfigError, "seed= needs an optimizer", r"method=hvd.SlowMo\(...\)"):
        hvd.SlowMo(seed=3)
    with raises(ConfigError, "not int"):
        hvd.LocalSGD(8)


@applies(least=2)  # one rank agrees with itself
def ranks_that_begin_apart_are_told() -> None:
    """At the first exchange; until then they can still be made equal."""
    for method in (
        rounds.DiLoCo(sync_every=2),
        rounds.SlowMo(sync_every=2),
        rounds.EASGD(sync_every=2),
        rounds.LocalSGD(sync_every=2, compression="topk:density=0.1"),
    ):
        model = make_model(seed=hvd.rank())
        optimizer = _wrapped(method, model)
        with raises(MismatchError, r"broadcast_parameters\(", "rank 0: .*0.weight"):
            _train(model, optimizer, range(2))
    model = make_model(seed=hvd.rank())
    optimizer = hvd.DiLoCo(sgd(model, **NESTEROV), sync_every=2)
    _train(model, optimizer, range(1))
    hvd.broadcast_parameters(model.state_dict(), 0)
    # The first round begins at the parameters of then.
    optimizer.load_state_dict(sgd(model, **NESTEROV).state_dict())
    _train(model, optimizer, range(1, 6))
    assert_same_everywhere(model)


def nan_on_a_rank_is_gone_after_an_exchange() -> None:
    """With momentum, which would lead there again; not if all have it."""
    leaders = {"local_every": 2, "global_every": 2, "groups": 1}
    for method in (
        rounds.DiLoCo(sync_every=2),
        rounds.SlowMo(sync_every=2, buffers="average"),
        rounds.EASGD(sync_every=2),
        *([rounds.LeaderSGD(**leaders)] if hvd.size() > 1 else []),
    ):
        model = make_model()
        optimizer = _wrapped(method, model)
        for step in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, hvd.rank(), step)
            if step == 2 and hvd.rank() == hvd.size() - 1:
                loss = loss * float("nan")
            loss.backward()
            optimizer.report(loss)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if step == 3 else "error")
                optimizer.step()
        assert all(torch.isfinite(p).all() for p in model.parameters()), method


def without_trained_parameters_nothing_happens() -> None:
    """From the beginning; if only one rank has none, all say so."""
    for method in (
        rounds.LocalSGD(sync_every=2),
        rounds.DiLoCo(sync_every=4, fragments=2, delay=1),
        rounds.LeaderSGD(local_every=2, global_every=4),
        rounds.EASGD(sync_every=2),
        hvd.ExactDiffusion("cycle"),
    ):
        model = make_model().requires_grad_(False)
        before = [p.clone() for p in model.parameters()]
        optimizer = _wrapped(method, model)
        for _ in range(5):
            optimizer.report(1.0)
            optimizer.step()
        assert optimizer.training.step == 5
        assert all(torch.equal(p, x) for p, x in zip(model.parameters(), before, strict=True))
        if hvd.size() > 1:
            model = make_model()
            if hvd.rank() == 1:
                model.requires_grad_(False)
            optimizer = _wrapped(method, model)
            with raises(MismatchError, "parameters"):
                for _ in range(5):
                    optimizer.report(1.0)
                    optimizer.step()


@applies(least=2)  # one rank has nobody who lacks anything
def averaged_buffers_are_there_on_all_ranks() -> None:
    """Where a parameter has had a gradient on some ranks alone, the error says what is missing."""
    model = make_model()
    optimizer = _wrapped(rounds.LocalSGD(sync_every=2, buffers="average"), model)
    with raises(MismatchError, "got no gradient there"):
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            if hvd.rank() == 1:
                next(model.parameters()).grad = None
            optimizer.step()


def an_optimizer_is_distributed_once() -> None:
    model = make_model()
    optimizer = hvd.LocalSGD(sgd(model))
    with raises(ConfigError, "distributed already"):
        hvd.DistributedOptimizer(optimizer, compression=hvd.TopK)
    with raises(ConfigError, "distributed already"):
        hvd.DiLoCo(optimizer)
    train(model, optimizer, range(1))
