"""Averages that are not applied, gradients that are changed in between, and ranks that step by
numbers or weights of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hvd_compress.agreement import SAMPLED_EVERY
from hvd_compress.torch import DGC, ConfigError, MismatchError, NoCompression, OneBit, TopK
from tests.scenarios import applies
from tests.scenarios.common import (
    assert_equal,
    assert_equal_states,
    assert_same_everywhere,
    backward,
    begin,
    distribute,
    loss_of,
    make_model,
    states_of,
    train,
    warned,
)
from tests.scenarios.driver import hvd, raises

METHODS = (DGC(density=0.05), TopK(density=0.05), OneBit(), "powersgd:rank=1")


def _assert_twins(one: Any, other: Any) -> None:
    (model, optimizer), (twin, its_optimizer) = one, other
    assert_equal(model, twin)
    assert_equal_states(states_of(optimizer), states_of(its_optimizer))
    assert optimizer.compression.step == its_optimizer.compression.step


def unfinished(model: Any, optimizer: Any) -> None:
    (100 * loss_of(model, hvd.rank(), 50)).backward()
    optimizer.compression.discard()


def finished(model: Any, optimizer: Any) -> None:
    """Its averages are known already."""
    (100 * loss_of(model, hvd.rank(), 50)).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.compression.discard()


def leaves_no_trace(drop: Callable[[Any, Any], None], one: Any, other: Any) -> None:
    """A run goes on as the other, which never saw the gradients that are dropped."""
    model, optimizer = one
    optimizer.compression.keep_undo()
    for run in (one, other):
        train(*run, range(2))
    optimizer.zero_grad()
    drop(model, optimizer)
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    for run in (one, other):
        train(*run, range(2, 4))
    _assert_twins(one, other)


def discarded_steps_leave_no_trace() -> None:
    def of_rank_0(model: Any, optimizer: Any) -> None:
        if hvd.rank() == 0:
            loss_of(model, 0, 50).backward()
        optimizer.compression.discard()

    def zeroed(model: Any, optimizer: Any) -> None:
        loss_of(model, hvd.rank(), 50).backward()
        optimizer.synchronize()  # as the other loss of a GAN leaves gradients that are not wanted
        optimizer.zero_grad()

    rows = [(drop, method) for method in METHODS for drop in (unfinished, finished)]
    for drop, method in (*rows, (of_rank_0, TopK(density=0.05)), (zeroed, DGC(density=0.05))):
        leaves_no_trace(drop, begin(method), begin(method))


def gradients_that_are_dropped_are_spoken_of_once() -> None:
    for compression, count in ((TopK(density=0.05), 1), (NoCompression(), 0)):
        model, optimizer = begin(compression)
        train(model, optimizer, range(2))
        with warned("keep_undo") as said:
            for step in (2, 3):
                backward(model, optimizer, step)
                optimizer.synchronize()
                optimizer.zero_grad()
        assert len(said) == count
        with raises(ConfigError, r"keep_undo\(\) once, before training"):
            optimizer.compression.discard()


def frozen_parameters_keep_what_waits() -> None:
    """The first way out: in the pass of the other loss nothing of them is exchanged."""
    model, optimizer = begin(TopK(density=0.05))
    train(model, optimizer, range(2))
    before, step = states_of(optimizer), optimizer.compression.step
    model.requires_grad_(False)
    x = torch.randn(4, 40, requires_grad=True, device=next(model.parameters()).device)
    model(x).sum().backward()
    model.requires_grad_(True)
    optimizer.zero_grad()
    assert_equal_states(states_of(optimizer), before)
    assert optimizer.compression.step == step


def a_gradient_that_some_ranks_lack_counts_as_zero() -> None:
    """The sum is divided by all ranks, and where no rank has one, what waits is applied."""
    last = hvd.size() - 1
    for compression in (NoCompression(), TopK(density=1.0), DGC(density=1.0, momentum=0.0)):
        some, none = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
        model = torch.nn.ParameterList([some, none])
        _, optimizer = begin(compression, model, lr=1.0, momentum=0.0)
        g = torch.arange(6.0).view(2, 3)
        if hvd.rank() == last:
            (some * g).sum().backward()
        optimizer.step()
        torch.testing.assert_close(some.detach(), -g / hvd.size())
        assert not none.detach().any()
    if hvd.size() == 1:  # nothing is exchanged there that has no gradient
        return
    w = torch.nn.Parameter(torch.zeros(4))
    _, optimizer = begin(TopK(density=0.5), torch.nn.ParameterList([w]), lr=1.0, momentum=0.0)
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
            model, optimizer = begin(compression)
            with warned("between backward() and step()") as said:
                for step in range(4):
                    backward(model, optimizer, step)
                    change(model, optimizer)
                    if change is averages:
                        with optimizer.skip_synchronize():
                            optimizer.step()
                    else:
                        optimizer.step()
            assert len(said) == count, (compression, change.__name__, said)


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
    model, optimizer = begin(TopK(density=0.05))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    for step in range(5):
        train(model, optimizer, [step])
        scheduler.step()
        optimizer.param_groups[0]["lr"] *= 1 + 1e-15 * hvd.rank()
    assert optimizer.compression.step == 5


@applies(least=2)
def weights_that_differ_are_an_error() -> None:
    run = begin(TopK(density=0.05), seed=hvd.rank())  # and nobody has broadcast them
    with raises(MismatchError, "broadcast_parameters"):
        train(*run, range(2))
    model, optimizer = begin(TopK(density=0.05))
    train(model, optimizer, range(2))
    if hvd.rank() == 0:
        with torch.no_grad():
            model[0].weight.add_(0.1)
    with raises(MismatchError, "weights"):
        train(model, optimizer, range(2, SAMPLED_EVERY + 2))


def weights_may_differ_by_rounding() -> None:
    model, optimizer = begin(NoCompression())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 1e-6 * hvd.rank())
    train(model, optimizer, range(SAMPLED_EVERY + 2))
    assert optimizer.compression.step == SAMPLED_EVERY + 2
    model, optimizer = begin(NoCompression())
    train(model, optimizer, range(2))
    assert_same_everywhere(model)


def a_step_that_a_scaler_leaves_out_leaves_no_trace() -> None:
    """One tensor of four has an Inf; what was sent of the other three would be lost."""
    one, other = begin(TopK(density=0.05)), begin(TopK(density=0.05))
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
