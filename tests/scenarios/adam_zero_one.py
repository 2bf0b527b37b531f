"""0/1 Adam in PyTorch, beside NumPy's formulas of it."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import numpy as np
import torch
from adam_reference import Options, ZeroOneAdam

from hvd_compress import NoCompression, ZeroOneAdamCompression
from hvd_compress.errors import ConfigError
from scenarios import oracle
from scenarios.common import distribute, make_model
from scenarios.common import train as train_torch
from scenarios.driver import assert_close, assert_same_everywhere, hvd, make, raises, train, turned

LR = 2.0**-7
FREEZE, UPDATES, SCALER, CLIPPER = 12, 2, 6, 4  # 1 2 4 6 8 12, then local


def _run(dtype: str = "float64", method: Any = None, **options: Any):
    own = {
        "var_freeze_step": FREEZE,
        "var_update_scaler": UPDATES,
        "local_step_scaler": SCALER,
        "local_step_clipper": CLIPPER,
        **{k: v for k, v in options.items() if k not in ("kind", "sparse_as_dense")},
    }
    schedule = {k: v for k, v in own.items() if k.startswith(("var", "local"))}
    method = method or ZeroOneAdamCompression(**schedule, min_size=0)
    rest = {k: v for k, v in options.items() if k in ("kind", "sparse_as_dense")}
    inner = functools.partial(hvd.ZeroOneAdam, **own)
    return make(method, dtype=dtype, lr=LR, optimizer=inner, **rest)


def _reference(steps: int, **options: Any) -> list[oracle.Weights]:
    """Of each rank."""
    ranks = hvd.size()
    weights = [oracle.initial_weights("mlp", "float64") for _ in range(ranks)]
    own = Options(lr=LR, freeze_step=FREEZE, **options)
    parts = {
        name: ZeroOneAdam(turned(name, w), ranks, own, UPDATES, SCALER, CLIPPER)
        for name, w in weights[0].items()
    }
    for step in range(steps):
        found = [oracle.gradients("mlp", weights[rank], rank, step) for rank in range(ranks)]
        for name, part in parts.items():
            for rank, p in enumerate(part.step([turned(name, g[name]) for g in found])):
                weights[rank][name] = turned(name, p)
    return weights


def it_follows_the_formulas() -> None:
    for options in ({}, {"bias_correction": False, "eps": 1e-4}):
        run = _run(**options)
        for steps in range(1, 37):
            train(run, [steps - 1])
            interval = 1 if steps <= 18 else 2 if steps <= 24 else 4
            if steps <= FREEZE or steps % interval == 0:
                assert_same_everywhere(run.weights())
            if steps in (12, 17, 21, 22, 34, 35, 36):
                expected = _reference(steps, **options)[hvd.rank()]
                assert_close(run.weights(), expected, rtol=1e-7, atol=1e-9)


def between_meetings_ranks_are_on_their_own() -> None:
    run = train(_run(), range(27))
    if hvd.size() > 1:
        with raises(AssertionError, "ranks diverged"):
            assert_same_everywhere(run.weights())
    run.optimizer.meet()
    assert_same_everywhere(run.weights())
    run.optimizer.meet()  # nothing new
    train(run, range(27, 28))
    assert_same_everywhere(run.weights())


def meeting_in_full_gives_the_mean() -> None:
    """Of where the ranks are; what one bit had left out is used up."""
    run = _run(local_step_scaler=1, local_step_clipper=1000)
    train(run, range(FREEZE + 2))  # 13 and 14 are meetings
    assert all("meet.residual" in s for s in run.optimizer.state.values())
    momentum = run.optimizer.state[run.model[0].weight]["exp_avg"].clone()
    run.optimizer.meet()  # nobody has moved, but something waits
    assert torch.equal(run.optimizer.state[run.model[0].weight]["exp_avg"], momentum)
    assert not any("meet.residual" in s for s in run.optimizer.state.values())
    assert_same_everywhere(run.weights())
    train(run, range(FREEZE + 2, FREEZE + 3))  # 15 is no meeting
    mine = run.weights()
    means = {
        name: hvd.allreduce(torch.tensor(w), op=hvd.Average, name=f"mean.{name}").numpy()
        for name, w in mine.items()
    }
    run.optimizer.meet()
    assert_close(run.weights(), means, rtol=1e-10, atol=1e-12)


def most_local_steps_send_nothing() -> None:
    run = _run("float32", local_step_scaler=1, local_step_clipper=4)
    name = "0.weight"
    sent = [0]
    for step in range(24):
        train(run, [step])
        sent.append(run.compression.stats().layers[name].bytes_sent)
    n = int(np.prod(oracle.WIDTHS[:2]))
    each = dict(enumerate(np.diff(sent), 1))
    bits = n / 8 * (1 + 1 / hvd.size())
    for step, count in each.items():
        if step in (1, 2, 4, 6, 8, 12):
            assert count == 4 * n
        elif step <= FREEZE or step in (13, 14, 16, 20, 24):
            assert bits <= count <= bits + 24 * (hvd.size() + 1), (step, count)
        else:
            assert count == 0, (step, count)


def with_decay_it_learns_like_adam() -> None:
    losses = {}
    for name, optimizer, method in (
        ("adam", functools.partial(torch.optim.AdamW, weight_decay=0.01), NoCompression()),
        ("0/1", None, None),
    ):
        run = (
            make(method, lr=LR, optimizer=optimizer)
            if optimizer
            else _run("float32", weight_decay=0.01, var_freeze_step=60, var_update_scaler=8)
        )
        train(run, range(160))
        losses[name] = _loss(run)
    start = _loss(make(NoCompression(), optimizer=torch.optim.Adam))
    assert losses["0/1"] < 1.2 * losses["adam"] + 0.03 < 0.6 * start, (losses, start)


def _loss(run: Any) -> float:
    batches = [oracle.batch("mlp", 99, step) for step in range(50)]
    x, y = (torch.tensor(np.concatenate([b[i] for b in batches])) for i in (0, 1))
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(run.model(x), y).item()


def what_is_saved_after_a_meeting_goes_on() -> None:
    runs = []
    model = make_model()
    adam = hvd.ZeroOneAdam(model.parameters(), **_schedule())
    optimizer = distribute(adam, model, adam.compressor(min_size=0))
    train_torch(model, optimizer, range(27))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.state_dict()
    assert any("optimizer.meet()" in str(w.message) for w in caught)
    optimizer.meet()
    optimizer.consolidate_state_dict()
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        again = make_model(seed=1)
        adam = hvd.ZeroOneAdam(again.parameters(), **_schedule())
        resumed = distribute(adam, again, adam.compressor(min_size=0))
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(copy.deepcopy(state))
        train_torch(again, resumed, range(27, 33))
        resumed.meet()
        runs.append(again)
    train_torch(model, optimizer, range(27, 33))
    optimizer.meet()
    for other in runs:
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def _schedule() -> dict[str, Any]:
    return {
        "lr": 0.01,
        "var_freeze_step": FREEZE,
        "var_update_scaler": UPDATES,
        "local_step_scaler": SCALER,
        "local_step_clipper": CLIPPER,
    }


def without_its_compression_it_steps_on_averages() -> None:
    run = train(_run("float32", NoCompression()), range(30))
    run.optimizer.meet()
    assert_same_everywhere(run.weights())


def what_does_not_fit_is_refused() -> None:
    with raises(ConfigError, "does not fit", "var_freeze_step=12"):
        _run(method=ZeroOneAdamCompression())
    with raises(ConfigError, "zero_one_adam", "SGD would take"):
        make(ZeroOneAdamCompression())
    for name in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
        with raises(ConfigError, name):
            _run(**{name: 0})
    run = train(_run("float64", kind="words"), range(FREEZE))
    with raises(ConfigError, "sparse_as_dense"):
        train(run, [FREEZE])
    run = train(_run("float64", kind="words", sparse_as_dense=True), range(20))
    assert_same_everywhere(run.weights())
    model = make_model()
    adam = hvd.ZeroOneAdam(model.parameters(), **{**_schedule(), "var_freeze_step": 1})
    optimizer = distribute(adam, model, adam.compressor())
    scaler = torch.amp.GradScaler("cpu")
    for step in range(2):
        scaler.scale(model(torch.ones(1, 40)).sum()).backward()
        if step:
            with raises(ConfigError, "loss scaling"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
