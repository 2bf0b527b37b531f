"""Averages that are not applied, gradients that are changed in between, and ranks that step by
numbers or weights of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from hvd_compress.torch import DGC, ConfigError, MismatchError, NoCompression, OneBit, TopK
from tests.scenarios import applies
from tests.scenarios.common import (
    assert_close,
    assert_same_everywhere,
    distribute,
    loss_of,
    make_model,
    sgd,
    train,
)
from tests.scenarios.driver import hvd, raises

METHODS = (DGC(density=0.05), TopK(density=0.05), OneBit(), "powersgd:rank=1")


def _twins(compression: Any, **options: Any) -> list[Any]:
    models = [make_model() for _ in range(2)]
    return [(m, distribute(sgd(m), m, compression, **options)) for m in models]


def _states(optimizer: Any) -> dict[str, Any]:
    store = optimizer.compression.store
    return {name: {k: x.clone() for k, x in store.get(name).items()} for name in store.names()}


def _assert_twins(one: Any, other: Any) -> None:
    (model, optimizer), (twin, its_optimizer) = one, other
    assert_close(model, twin, rtol=0, atol=0)
    torch.testing.assert_close(_states(optimizer), _states(its_optimizer), rtol=0, atol=0)
    assert optimizer.compression.step == its_optimizer.compression.step


def discarded_steps_leave_no_trace() -> None:
    for compression in METHODS:
        one, other = _twins(compression)
        model, optimizer = one
        optimizer.compression.keep_undo()
        for first in (0, 2):
            train(*one, range(first, first + 2))
            train(*other, range(first, first + 2))
            optimizer.zero_grad()
            (100 * loss_of(model, hvd.rank(), 50)).backward()
            if first:  # its averages are known already
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.compression.discard()
            assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
            optimizer.zero_grad()
        train(*one, range(4, 6))
        train(*other, range(4, 6))
        _assert_twins(one, other)


def _dropping_leaves_no_trace(compression: Any, drop: Callable[[Any, Any], None]) -> None:
    one, other = _twins(compression)
    model, optimizer = one
    optimizer.compression.keep_undo()
    train(*one, range(2))
    train(*other, range(2))
    optimizer.zero_grad()
    drop(model, optimizer)
    train(*one, range(2, 4))
    train(*other, range(2, 4))
    _assert_twins(one, other)


def a_rank_without_gradients_discards_with_the_others() -> None:
    def drop(model, optimizer):
        if hvd.rank() == 0:
            loss_of(model, 0, 50).backward()
        optimizer.compression.discard()

    _dropping_leaves_no_trace(TopK(density=0.05), drop)


def zeroing_what_was_synchronized_discards_it() -> None:
    def drop(model, optimizer):
        loss_of(model, hvd.rank(), 50).backward()
        optimizer.synchronize()  # as the other loss of a GAN leaves gradients that are not wanted
        optimizer.zero_grad()

    _dropping_leaves_no_trace(DGC(density=0.05), drop)


def gradients_that_are_dropped_are_spoken_of_once() -> None:
    for compression, count in ((TopK(density=0.05), 1), (NoCompression(), 0)):
        model = make_model()
        optimizer = distribute(sgd(model), model, compression)
        train(model, optimizer, range(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (2, 3):
                optimizer.zero_grad()
                loss_of(model, hvd.rank(), step).backward()
                optimizer.synchronize()
                optimizer.zero_grad()
        assert len([w for w in caught if "keep_undo" in str(w.message)]) == count
        with raises(ConfigError, r"keep_undo\(\) once, before training"):
            optimizer.compression.discard()


def the_error_of_zero_grad_names_the_ways_out() -> None:
    model = make_model()
    optimizer = distribute(sgd(model), model, TopK(density=0.05))
    loss_of(model, hvd.rank(), 0).backward()
    for way in (r"requires_grad_\(False\)", r"compression\.discard\(\)"):
        with raises(AssertionError, way):
            optimizer.zero_grad()
    optimizer.step()


def frozen_parameters_keep_what_waits() -> None:
    """The first way out: in the pass of the other loss nothing of them is exchanged."""
    model = make_model()
    optimizer = distribute(sgd(model), model, TopK(density=0.05))
    train(model, optimizer, range(2))
    before, step = _states(optimizer), optimizer.compression.step
    model.requires_grad_(False)
    x = torch.randn(4, 40, requires_grad=True, device=next(model.parameters()).device)
    model(x).sum().backward()
    model.requires_grad_(True)
    optimizer.zero_grad()
    torch.testing.assert_close(_states(optimizer), before, rtol=0, atol=0)
    assert optimizer.compression.step == step


def a_gradient_that_some_ranks_lack_counts_as_zero() -> None:
    """The sum is divided by all ranks, and where no rank has one, what waits is applied."""
    last = hvd.size() - 1
    for compression in (NoCompression(), TopK(density=1.0), DGC(density=1.0, momentum=0.0)):
        some, none = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([some, none], lr=1.0), [("some", some), ("none", none)], compression
        )
        g = torch.arange(6.0).view(2, 3)
        if hvd.rank() == last:
            (some * g).sum().backward()
        optimizer.step()
        torch.testing.assert_close(some.detach(), -g / hvd.size())
        assert not none.detach().any()
    if hvd.size() == 1:  # nothing is exchanged there that has no gradient
        return
    w = torch.nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([w], lr=1.0), [("w", w)], TopK(density=0.5)
    )
    g = torch.tensor([4.0, 3.0, 2.0, 1.0])
    (w * g).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # no rank has a gradient
    torch.testing.assert_close(w.detach(), -g)


def changes_before_the_step_are_spoken_of_once() -> None:
    def scale(model, optimizer):
        for p in model.parameters():
            p.grad.mul_(0.5)

    def replace(model, optimizer):
        for p in model.parameters():
            p.grad = p.grad / 2

    def clip(model, optimizer):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def nothing(model, optimizer):
        pass

    def averages(model, optimizer):
        optimizer.synchronize()
        clip(model, optimizer)

    rows = ((scale, 1), (replace, 1), (clip, 1), (nothing, 0), (averages, 0))
    for compression in (TopK(density=0.05), NoCompression(), "powersgd", OneBit()):
        for change, count in rows:
            model = make_model()
            optimizer = distribute(sgd(model), model, compression)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(4):
                    optimizer.zero_grad()
                    loss_of(model, hvd.rank(), step).backward()
                    change(model, optimizer)
                    if change is averages:
                        with optimizer.skip_synchronize():
                            optimizer.step()
                    else:
                        optimizer.step()
            told = [w for w in caught if "between backward() and step()" in str(w.message)]
            assert len(told) == count, (
                compression,
                change.__name__,
                [str(w.message) for w in told],
            )


@applies(least=2)
def numbers_of_the_optimizer_that_differ_are_an_error() -> None:
    kinds = {
        "lr": lambda p: torch.optim.SGD(p, lr=0.1),
        "weight_decay": lambda p: torch.optim.AdamW(p, lr=0.01),
        "betas": lambda p: torch.optim.Adam(p, lr=0.01),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
        "alpha": lambda p: torch.optim.RMSprop(p, lr=0.01),
    }
    for key, make in kinds.items():
        model = make_model()
        optimizer = distribute(make(model.parameters()), model, TopK(density=0.05))
        train(model, optimizer, range(2))
        if hvd.rank() == 0:
            group = optimizer.param_groups[0]
            group[key] = (0.5, 0.9) if key == "betas" else group[key] + 0.125
        with raises(MismatchError, f"optimizer(.|\n)*{key}="):
            train(model, optimizer, range(2, 4))


def rates_may_be_scheduled_and_differ_by_rounding() -> None:
    model = make_model()
    optimizer = distribute(sgd(model), model, TopK(density=0.05))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    for step in range(5):
        train(model, optimizer, [step])
        scheduler.step()
        optimizer.param_groups[0]["lr"] *= 1 + 1e-15 * hvd.rank()
    assert optimizer.compression.step == 5


@applies(least=2)
def weights_that_differ_are_an_error() -> None:
    model = make_model(seed=hvd.rank())  # and nobody has broadcast them
    optimizer = distribute(sgd(model), model, TopK(density=0.05))
    with raises(MismatchError, "broadcast_parameters"):
        train(model, optimizer, range(2))
    model = make_model()
    optimizer = distribute(sgd(model), model, TopK(density=0.05))
    train(model, optimizer, range(2))
    if hvd.rank() == 0:
        with torch.no_grad():
            model[0].weight.add_(0.1)
    with raises(MismatchError, "weights"):
        train(model, optimizer, range(2, 70))


def weights_may_differ_by_rounding() -> None:
    model = make_model()
    optimizer = distribute(sgd(model), model, NoCompression())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-6 * hvd.rank())
    train(model, optimizer, range(70))
    assert optimizer.compression.step == 70
    model = make_model()
    optimizer = distribute(sgd(model), model, NoCompression())
    train(model, optimizer, range(2))
    assert_same_everywhere(model)


def a_step_that_a_scaler_leaves_out_leaves_no_trace() -> None:
    """One tensor of four has an Inf; what was sent of the other three would be lost."""
    one, other = _twins(TopK(density=0.05))
    one[1].compression.keep_undo()
    device = next(one[0].parameters()).device.type
    scalers = [torch.amp.GradScaler(device, init_scale=16.0) for _ in range(2)]

    def step(model, optimizer, scaler, number, overflows=False):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, hvd.rank(), number)).backward()
        optimizer.synchronize()
        if overflows:
            model[4].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()

    for number in range(4):
        if number == 2:
            step(*one, scalers[0], 50, overflows=True)
        step(*one, scalers[0], number)
        step(*other, scalers[1], number)
    assert [scaler.get_scale() for scaler in scalers] == [8.0, 16.0]
    _assert_twins(one, other)
