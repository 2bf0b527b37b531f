"""Models that teach each other, in PyTorch, beside a reference that has all of them here."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvd_compress.errors import ConfigError, MismatchError
from hvd_compress.systems.teachers import losses as in_numpy
from hvd_compress.wire.header import padded
from tests.devices import DEVICE
from tests.scenarios import applies
from tests.scenarios.common import LR, assert_same_everywhere, batch, make_model, sgd
from tests.scenarios.driver import hvd, raises

Models = list[Any]
STEPS = 8


def _task(model: Any, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, the logits and the inputs of a rank's batch."""
    x, y = batch(rank, step)
    logits = model(x)
    return torch.nn.functional.cross_entropy(logits, y), logits, x


def _train(
    model: Any,
    codistillation: Any,
    steps: range,
    of_rank: Callable[[], int],
    optimizer: Any = None,
) -> Any:
    optimizer = optimizer or sgd(model)
    for step in steps:
        optimizer.zero_grad()
        loss, logits, x = _task(model, of_rank(), step)
        codistillation.loss(loss, logits, x).backward()
        optimizer.step()
    return optimizer


def _mine() -> int:
    return hvd.rank()


def _common() -> int:
    return 0


def _distance(kind: str, z: torch.Tensor, teachers: list[torch.Tensor]) -> torch.Tensor:
    """Written again, from the formulas."""
    if kind == "mse":
        return ((z - sum(teachers) / len(teachers)) ** 2).mean()
    log_q, p = z.log_softmax(-1), sum(t.softmax(-1) for t in teachers) / len(teachers)
    if kind == "reverse_kl":
        each = [(log_q.exp() * (log_q - t.log_softmax(-1))).sum(-1).mean() for t in teachers]
        return sum(each) / len(each)
    constant = (p * p.log()).sum(-1).mean() if kind == "kl" else 0
    return constant - (p * log_q).sum(-1).mean()


def _reference(kind: str, teachers_at: Callable[..., Any], of_rank: Callable[[int], int]) -> Models:
    """All ranks' models, trained in this process.

    Args:
        teachers_at: returns the models that teach in a step, in rank order, given the step and the
            models of all ranks of before it; ``None`` in steps without distillation.
    """
    models = [make_model(seed) for seed in range(hvd.size())]
    optimizers = [sgd(model) for model in models]
    for step in range(STEPS):
        teachers = teachers_at(step, copy.deepcopy(models))
        losses = []
        for rank, model in enumerate(models):
            loss, logits, x = _task(model, of_rank(rank), step)
            others = [m for j, m in enumerate(teachers or ()) if j != rank]
            with torch.no_grad():
                outputs = [other(x) for other in others]
            losses.append(loss + 0.5 * _distance(kind, logits, outputs) if outputs else loss)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return models


def _assert_equal(model: Any, expected: Any, label: Any) -> None:
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=f"{label}, {name}")


def predictions_follow_a_reference() -> None:
    for kind, every, burn_in in (("mse", 1, 0), ("kl", 1, 3), ("reverse_kl", 2, 1)):
        model = make_model(hvd.rank())
        codistillation = hvd.Codistillation(
            model, "predictions", every=every, burn_in=burn_in, weight=0.5, loss=kind
        )
        _train(model, codistillation, range(STEPS), _common)

        def teachers_at(step: int, models: Models, every=every, burn_in=burn_in) -> Any:
            return models if step >= burn_in and (step - burn_in) % every == 0 else None

        expected = _reference(kind, teachers_at, lambda rank: 0)
        _assert_equal(model, expected[hvd.rank()], kind)
        assert codistillation.exchanges == len(range(burn_in, STEPS, every)) * (hvd.size() > 1)
        assert codistillation.step == STEPS


def checkpoints_follow_a_reference() -> None:
    for kind, every, burn_in, delay in (("kl", 3, 2, 0), ("cross_entropy", 4, 0, 2)):
        model = make_model(hvd.rank())
        codistillation = hvd.Codistillation(
            model, every=every, burn_in=burn_in, delay=delay, weight=0.5, loss=kind
        )
        _train(model, codistillation, range(STEPS), _mine)
        seen: list[Models] = []

        def teachers_at(
            step: int, models: Models, seen=seen, every=every, burn_in=burn_in, delay=delay
        ) -> Any:
            seen.append(models)
            begun = [s for s in range(burn_in, step + 1, every) if s + delay <= step]
            return seen[begun[-1]] if begun else None

        expected = _reference(kind, teachers_at, lambda rank: rank)
        _assert_equal(model, expected[hvd.rank()], (kind, delay))


def losses_are_those_in_numpy() -> None:
    random = np.random.default_rng(0)
    z, *teachers = random.standard_normal((4, 6, 5))
    from hvd_compress.torch.systems.codistillation import LOSSES

    assert LOSSES.keys() == in_numpy.LOSSES.keys()
    for name, (view, distance) in in_numpy.LOSSES.items():
        expected = distance(z, in_numpy.target(view, teachers))
        view, distance = LOSSES[name]

        def value(shape: Callable[[Any], Any], view=view, distance=distance) -> float:
            own, *others = (torch.from_numpy(shape(x)) for x in (z, *teachers))
            return distance(own, in_numpy.target(view, others)).item()

        flat = value(lambda x: x)
        # Images of 2 x 3 pixels: classes are dimension 1, as for cross_entropy.
        pixels = value(lambda x: np.ascontiguousarray(x.reshape(1, 2, 3, 5).transpose(0, 3, 1, 2)))
        assert abs(flat - expected) < 1e-12, name
        assert abs(pixels - expected) < 1e-12, name
        one = torch.from_numpy(z[0])  # an example without a dimension for the batch
        assert distance(one, view(one)) == distance(one[None], view(one[None])), name


def identical_models_train_as_if_alone() -> None:
    plain, model = make_model(), make_model()
    codistillation = hvd.Codistillation(model, "predictions", loss="mse")
    _train(model, codistillation, range(STEPS), _common)
    optimizer = sgd(plain)
    for step in range(STEPS):
        optimizer.zero_grad()
        _task(plain, 0, step)[0].backward()
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    if hvd.size() > 1:
        assert codistillation.stats().total.bytes_sent > 0


def bytes_are_counted() -> None:
    others = hvd.size() - 1
    n = sum(p.numel() for p in make_model().parameters())
    for exchange, values, expected in (
        # Behind the frame's header one of 22 bytes, and 8 for the length, not known beforehand.
        ("predictions", None, padded(22 + 8 * 5 * 4) + 8),
        ("predictions", "float16", padded(22 + 8 * 5 * 2) + 8),
        ("checkpoints", None, padded(4 * n)),
        ("checkpoints", "float16", padded(2 * n)),
    ):
        model = make_model(hvd.rank())
        codistillation = hvd.Codistillation(model, exchange, every=4, values=values)
        _train(model, codistillation, range(STEPS), _common)
        total = codistillation.stats().total
        assert total.bytes_sent == 2 * others * expected, (exchange, values, total)
        assert total.bytes_received == total.bytes_sent
        assert total.steps == codistillation.exchanges == 2 * (others > 0)
        assert total.dense_bytes == 2 * others * (8 * 5 * 4 if exchange == "predictions" else 4 * n)


@applies(least=2)
def a_rank_with_nan_is_no_teacher() -> None:
    for exchange in ("predictions", "checkpoints"):
        model = make_model(hvd.rank())
        if hvd.rank() == 0:
            with torch.no_grad():
                next(model.parameters()).fill_(torch.nan)
        codistillation = hvd.Codistillation(model, exchange, every=1, weight=1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(2):
                task, logits, x = _task(model, 0, step)
                loss = codistillation.loss(task, logits, x)
                assert loss.isfinite() == (hvd.rank() != 0)
                if hvd.size() == 2 and hvd.rank() == 1:  # no teacher is left
                    assert loss is task
        told = [str(w.message) for w in caught if "is no teacher" in str(w.message)]
        if hvd.rank():
            assert len(told) == 1
            assert "NaN or Inf in what the model of rank 0 predicts in step 1" in told[0]
        else:
            assert told == [] or exchange == "checkpoints"


@applies(least=2)
def ranks_that_differ_are_told() -> None:
    model = make_model(hvd.rank())
    codistillation = hvd.Codistillation(model, "predictions")
    with raises(MismatchError, "the inputs of this rank and of rank", "differ"):
        codistillation.loss(*_task(model, hvd.rank(), 0))
    codistillation = hvd.Codistillation(model, "predictions")
    x = torch.ones(4 + hvd.rank(), 40, device=DEVICE)
    with raises(MismatchError, r"float32 \(\d, 5\), and rank"):
        codistillation.loss(torch.tensor(0.0), model(x), x)
    codistillation = hvd.Codistillation(model, "predictions", weight=1.0 + hvd.rank())
    with raises(MismatchError, "codistillation", "weight=1.0", "weight=2.0"):
        codistillation.loss(*_task(model, 0, 0))
    other = torch.nn.Linear(40, 5 + hvd.rank()).to(DEVICE)
    codistillation = hvd.Codistillation(other)
    with raises(MismatchError, "model", r"weight \[5, 40\]"):
        codistillation.loss(*_task(other, 0, 0))
    # Without inputs nobody compares them, and checkpoints need no common batches.
    loss, logits, _ = _task(model, hvd.rank(), 0)
    hvd.Codistillation(model, "predictions").loss(loss, logits)
    codistillation = hvd.Codistillation(model)
    x = torch.ones(4 + hvd.rank(), 40, device=DEVICE)
    codistillation.loss(model(x).sum(), model(x), x)
    with raises(ConfigError, r"codistillation.loss\(task, logits, x\)"):
        codistillation.loss(loss, logits)


@applies(least=2)
def what_is_frozen_is_sent_once() -> None:
    model = make_model(hvd.rank())
    first = list(model.parameters())[:2]
    for p in first:
        p.requires_grad_(False)
    codistillation = hvd.Codistillation(model, every=1)
    every = sum(p.numel() for p in model.parameters())
    rest = every - sum(p.numel() for p in first)
    sent = []

    def step(number: int) -> None:
        before = codistillation.stats().total.bytes_sent
        _train(model, codistillation, range(number, number + 1), _mine)
        sent.append((codistillation.stats().total.bytes_sent - before) // (hvd.size() - 1))

    step(0)
    step(1)
    for p in first:
        p.requires_grad_(True)
    step(2)
    for p in first:
        p.requires_grad_(False)
    step(3)  # with what the step before has changed
    step(4)
    assert sent == [padded(4 * n) for n in (every, rest, every, every, rest)]
    own = [p.detach().clone() for p in first]
    codistillation.loss(*_task(model, hvd.rank(), 5))
    left = (hvd.rank() - 1) % hvd.size()
    sources = [rank for rank in range(hvd.size()) if rank != hvd.rank()]
    theirs = codistillation.teachers[sources.index(left)]
    for i, name in enumerate(("0.weight", "0.bias")):
        everyone = hvd.allgather(own[i].reshape(1, -1), name=f"frozen.{i}")
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
            codistillation = hvd.Codistillation(model, exchange, every=1)
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


def a_run_goes_on_from_its_state() -> None:
    for options in (
        {"every": 3, "burn_in": 1},
        {"every": 3, "delay": 2},
        {"exchange": "predictions", "every": 2},
    ):
        where = _common if "exchange" in options else _mine
        model = make_model(hvd.rank())
        one = hvd.Codistillation(model, **options)
        optimizer = _train(model, one, range(6), where)
        saved = copy.deepcopy((one.state_dict(), model.state_dict(), optimizer.state_dict()))
        _train(model, one, range(6, 10), where, optimizer)
        other = make_model(99)
        two = hvd.Codistillation(other, **options)
        optimizer = sgd(other)
        two.load_state_dict(saved[0])
        other.load_state_dict(saved[1])
        optimizer.load_state_dict(saved[2])
        assert two.step == 6
        _train(other, two, range(6, 10), where, optimizer)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q), options


def states_that_do_not_fit() -> None:
    model = make_model(hvd.rank())
    codistillation = hvd.Codistillation(model, every=2)
    _train(model, codistillation, range(3), _mine)
    state = codistillation.state_dict()
    teachers = codistillation.owner.state
    for broken, words in (
        ({**state, "version": 7}, "version 7"),
        ({**state, "exchange": "predictions"}, "exchange must be one of 'checkpoints'"),
        ({k: v for k, v in state.items() if k != "state"}, "has no 'state'"),
        ({**state, "state": {"0": {"w": torch.ones(1)}}}, "another model"),
    ):
        with raises(ConfigError, words):
            codistillation.load_state_dict(broken)
    assert codistillation.owner.state is teachers
    # What rank 0 saved gives others the step alone; they learn again from the next exchange on.
    everyones = hvd.broadcast_object(state if hvd.rank() == 0 else None, 0, name="state")
    codistillation.load_state_dict(everyones)
    assert codistillation.step == 3
    assert len(codistillation.teachers) == (hvd.size() - 1) * (hvd.rank() == 0)
    _train(model, codistillation, range(3, 5), _mine)
    assert len(codistillation.teachers) == hvd.size() - 1


@applies(least=2)
def groups_train_data_parallel() -> None:
    last = hvd.size() - 1
    groups = [list(range(last)), [last]]
    sets = [hvd.add_process_set(hvd.ProcessSet(ranks)) for ranks in groups]
    mine = sets[hvd.rank() == last]
    model = make_model(int(hvd.rank() == last))
    codistillation = hvd.Codistillation(model, groups=groups, every=2, burn_in=1, weight=0.5)
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


def samplers_of_groups() -> None:
    model = make_model()
    codistillation = hvd.Codistillation(model, "predictions", groups=hvd.size())
    order = list(codistillation.sampler(3 * hvd.size() + 1, seed=1))
    everyone = hvd.allgather(torch.tensor(order), name="groups.order").tolist()
    each = (3 * hvd.size() + 1) // hvd.size()
    assert len(order) == each
    assert len(set(everyone)) == each * hvd.size()
    codistillation = hvd.Codistillation(model, "predictions")
    assert len(list(codistillation.sampler(range(10)))) == 10


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
        loss, logits, x = _task(model, hvd.rank(), step)
        codistillation.loss(loss, logits, x)
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
    if hvd.size() > 2:
        with raises(ConfigError, "differ in size"):
            hvd.Codistillation(make_model(), "predictions", groups=2 if hvd.size() % 2 else 3)
