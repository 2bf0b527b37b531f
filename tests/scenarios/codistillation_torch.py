"""Models that teach each other, in PyTorch: what is sent, groups, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.systems.distillation import target
from hvd_compress.torch.codistillation import LOSSES
from hvd_compress.wire.header import padded
from tests.devices import DEVICE
from tests.scenarios import applies, oracle
from tests.scenarios.common import LR, assert_same_everywhere, batch, make_model
from tests.scenarios.driver import hvd, raises, student


def _task(model: Any, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, the logits and the inputs of a rank's batch."""
    x, y = batch(rank, step)
    logits = model(x)
    return torch.nn.functional.cross_entropy(logits, y), logits, x


def losses_take_images_and_single_examples() -> None:
    """For images, here of 2 x 3 pixels, classes are dimension 1, as for cross_entropy."""
    z, *teachers = torch.randn(4, 6, 5, dtype=torch.float64)
    for view, distance in LOSSES.values():
        own, *others = (x.view(1, 2, 3, 5).permute(0, 3, 1, 2) for x in (z, *teachers))
        found = distance(own, target(view, others))
        torch.testing.assert_close(found, distance(z, target(view, teachers)))
        one = z[0]  # an example without a dimension for the batch
        assert distance(one, view(one)) == distance(one[None], view(one[None]))


@applies(least=2)
def models_and_batches_that_differ_are_told() -> None:
    other = torch.nn.Linear(40, 5 + hvd.rank()).to(DEVICE)
    with raises(MismatchError, "model", r"weight \[5, 40\]"):
        hvd.Codistillation(other).loss(*_task(other, 0, 0))
    # Without inputs nobody compares them, and checkpoints need no common batches.
    model = make_model(hvd.rank())
    loss, logits, _ = _task(model, hvd.rank(), 0)
    hvd.Codistillation(model, "predictions").loss(loss, logits)
    codistillation = hvd.Codistillation(model)
    x = torch.ones(4 + hvd.rank(), 40, device=DEVICE)
    codistillation.loss(model(x).sum(), model(x), x)
    with raises(ConfigError, r"codistillation.loss\(task, logits, x\)"):
        codistillation.loss(loss, logits)


@applies(least=2)
def a_rank_with_nothing_to_send_is_told_that_others_differ() -> None:
    model = make_model(hvd.rank())
    codistillation = hvd.Codistillation(model, every=1)
    codistillation.loss(*_task(model, hvd.rank(), 0))
    if hvd.rank() == 0:
        model.requires_grad_(False)
    codistillation.loss(*_task(model, hvd.rank(), 1))  # what was trained before is sent once more
    with raises(MismatchError, "model", "rank 0: 0: "):
        codistillation.loss(*_task(model, hvd.rank(), 2))


@applies(least=2)
def what_is_frozen_is_sent_once() -> None:
    own = student(oracle.others_weights(hvd.rank()), every=1)
    model, sent = own.model, []
    first = list(model.parameters())[:2]
    every = sum(p.numel() for p in model.parameters())
    rest = every - sum(p.numel() for p in first)
    # What was trained in between is sent once more.
    for number, trained in enumerate((False, False, True, False, False)):
        for p in first:
            p.requires_grad_(trained)
        before = own.codistillation.stats().total.bytes_sent
        own.step(hvd.rank(), number)
        after = own.codistillation.stats().total.bytes_sent
        sent.append((after - before) // (hvd.size() - 1))
    assert sent == [padded(8 * n) for n in (every, rest, every, every, rest)]
    kept = [p.detach().clone() for p in first]
    own.losses(hvd.rank(), 5)
    left = (hvd.rank() - 1) % hvd.size()
    sources = [rank for rank in range(hvd.size()) if rank != hvd.rank()]
    theirs = own.codistillation.teachers[sources.index(left)]
    for i, name in enumerate(("0.weight", "0.bias")):
        everyone = hvd.allgather(kept[i].reshape(1, -1), name=f"frozen.{i}")
        assert torch.equal(theirs[name].reshape(-1), everyone[left])


@applies(least=2)
def teachers_predict_in_inference_mode() -> None:
    """With the statistics of batch normalisation that they have learnt, without dropout, and
    without a trace in model or random numbers."""

    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            torch.nn.Linear(40, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 5),
        ).to(DEVICE)

    models = [make(rank) for rank in range(hvd.size())]
    for model in models:
        for step in range(3):
            model(batch(0, step)[0])
    model = models[hvd.rank()]
    codistillation = hvd.Codistillation(model, loss="mse", weight=1.0)
    before = copy.deepcopy(model.state_dict())
    x, random = batch(7, 0)[0], torch.get_rng_state()
    z = torch.zeros(8, 5, device=DEVICE)
    loss = codistillation.loss(torch.tensor(0.0), z, x)
    others = [m.eval()(x) for rank, m in enumerate(models) if rank != hvd.rank()]
    torch.testing.assert_close(loss, ((sum(others) / len(others)) ** 2).mean())
    model.train()
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@applies(least=2)
def half_precision_and_tied_weights() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        model = make_model(hvd.rank(), dtype)
        model[0].bias = torch.nn.Parameter(torch.zeros(64, dtype=dtype, device=DEVICE))
        for exchange in ("checkpoints", "predictions"):
            codistillation = hvd.Codistillation(model, exchange, every=1, values="float16")
            x = batch(0, 0)[0].to(dtype)
            logits = model(x)
            loss = codistillation.loss(logits.float().sum(), logits, x)
            loss.backward()
            assert loss.isfinite()
    tied = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 5))
    tied[1].weight = tied[0].weight
    codistillation = hvd.Codistillation(tied)
    x = torch.ones(2, 5)
    codistillation.loss(tied(x).sum(), tied(x), x)
    assert codistillation.stats().total.bytes_sent == padded(4 * 35) * (hvd.size() - 1)


def what_rank_0_saved_gives_others_the_step_alone() -> None:
    """They learn again from the next exchange on; the laws have damaged states."""
    own = student(oracle.others_weights(hvd.rank()), every=2)
    for step in range(3):
        own.step(hvd.rank(), step)
    codistillation = own.codistillation
    state = codistillation.state_dict()
    with raises(ConfigError, "another model"):
        codistillation.load_state_dict({**state, "state": {"0": {"w": torch.ones(1)}}})
    everyones = hvd.broadcast_object(state if hvd.rank() == 0 else None, 0, name="state")
    codistillation.load_state_dict(everyones)
    assert codistillation.step == 3
    assert len(codistillation.teachers) == (hvd.size() - 1) * (hvd.rank() == 0)
    for step in range(3, 5):
        own.step(hvd.rank(), step)
    assert len(codistillation.teachers) == hvd.size() - 1


@applies(least=2)
def groups_train_data_parallel() -> None:
    last = hvd.size() - 1
    ranks = list(range(hvd.size()))
    sets = [hvd.add_process_set(hvd.ProcessSet(own)) for own in (ranks[:last], ranks[last:])]
    mine = sets[hvd.rank() == last]
    model = make_model(int(hvd.rank() == last))
    codistillation = hvd.Codistillation(model, groups=last, every=2, burn_in=1, weight=0.5)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), LR), compression="none", process_set=mine
    )
    for step in range(5):
        optimizer.zero_grad()
        loss, logits, x = _task(model, hvd.rank(), step)
        codistillation.loss(loss, logits, x).backward()
        optimizer.step()
    total = codistillation.stats().total
    n = padded(4 * sum(p.numel() for p in model.parameters()))
    # The first of the large group teaches the last rank, and is taught, as are its like, by it.
    targets = {0: 1, last: last}.get(hvd.rank(), 0)
    assert total.bytes_sent == 2 * n * targets
    assert total.bytes_received == 2 * n
    assert_same_everywhere(model, mine)
    everyone = hvd.allgather(next(model.parameters()).detach()[None], name="groups.models")
    assert not torch.equal(everyone[0], everyone[last])
    for process_set in sets:
        hvd.remove_process_set(process_set)


def weight_decay_follows_its_schedule() -> None:
    """As if the user had set it; of groups without, and over a checkpoint, it stays as it was."""
    schedule = hvd.WeightDecay(values=(0.5, 0.25, 0.0), at_steps=(2, 4))
    model = make_model()
    first, *rest = model.parameters()
    groups = [{"params": rest}, {"params": [first], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=LR, weight_decay=0.5)
    codistillation = hvd.Codistillation(model, every=3, weight_decay=schedule)
    found = []
    for step in range(6):
        codistillation.loss(*_task(model, hvd.rank(), step))
        codistillation.set_weight_decay(optimizer)
        found.append([group["weight_decay"] for group in optimizer.param_groups])
        optimizer.load_state_dict(optimizer.state_dict())
    assert found == [[decay, 0.0] for decay in (0.5, 0.5, 0.25, 0.25, 0.0, 0.0)]
    with raises(ConfigError, "no schedule"):
        hvd.Codistillation(model).set_weight_decay(optimizer)


def options_are_checked() -> None:
    with raises(ConfigError, "model must be a torch.nn.Module"):
        hvd.Codistillation([torch.nn.Linear(1, 1)])
    with raises(ConfigError, "exchange must be one of"):
        hvd.Codistillation(make_model(), "gradients")
    with raises(TypeError, "wight"):
        hvd.Codistillation(make_model(), wight=1.0)
