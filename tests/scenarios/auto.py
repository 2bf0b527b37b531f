"""A method that is chosen in the first steps, in PyTorch over Horovod and over MPI."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from hvd_compress.advisor import auto, meeting
from tests.scenarios import applies
from tests.scenarios.common import assert_close, assert_same_everywhere, begin, train, train_scaled
from tests.scenarios.driver import assert_same_everywhere as same_weights
from tests.scenarios.driver import hvd, make
from tests.scenarios.driver import train as train_run

TEXT = "topk:density=0.05"
AUTO = hvd.Auto(steps=2)
#: steps until the choice
CHOICE = auto.UNEVEN + AUTO.steps


def reducer_of(optimizer: Any) -> Any:
    return optimizer.compression.reducer


def facts(optimizer: Any) -> dict[str, Any]:
    """The choice and knowledge of all ranks, which must be the same."""
    found = optimizer.compression.stats().choice
    everyone = meeting.told(reducer_of(optimizer), found, torch.empty(0))
    assert all(each == found for each in everyone), everyone
    return found


@contextlib.contextmanager
def chosen(text: str) -> Iterator[None]:
    """Rank 0 chooses so, whatever was measured."""
    with mock.patch.object(hvd.Auto, "choice", return_value=(text, "for a test")):
        yield


def still(optimizer: Any) -> None:
    """A clock that stands still."""
    reducer_of(optimizer).clock.now = lambda: 0.0


def one_of_them_is_chosen_by_what_is_measured() -> None:
    model, optimizer = begin("auto:steps=2")
    train(model, optimizer, range(CHOICE))
    found = facts(optimizer)
    if hvd.size() > 1:
        assert f"measured between {hvd.size()} ranks on 1 host" in found["why"]
    train(model, optimizer, range(CHOICE, CHOICE + 4))
    facts(optimizer)
    assert_same_everywhere(model)


@applies(least=2)
def checkpoints_have_the_choice() -> None:
    model, optimizer = begin(AUTO)
    still(optimizer)
    with chosen(TEXT):
        train(model, optimizer, range(CHOICE + 3))
    optimizer.consolidate_state_dict()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    found = facts(optimizer)
    copy, again = begin(AUTO)
    copy.load_state_dict(model.state_dict())
    still(again)
    file.seek(0)
    again.load_state_dict(torch.load(file))
    assert facts(again) == found
    with mock.patch.object(auto, "measured_network", None):  # nothing is measured again
        train(copy, again, range(CHOICE + 3, CHOICE + 8))
    assert facts(again) == found
    assert_same_everywhere(copy)
    # Loaded on one rank and broadcast.
    third, optimizer_3 = begin(AUTO)
    still(optimizer_3)
    file.seek(0)
    if hvd.rank() == 0:
        optimizer_3.load_state_dict(torch.load(file))
    hvd.broadcast_parameters(third.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer_3, root_rank=0)
    assert facts(optimizer_3) == found
    train(third, optimizer_3, range(3))
    assert_same_everywhere(third)


@applies(least=2)
def loss_scaling_goes_on_through_the_choice() -> None:
    models = []
    for scales in (True, False):
        model, optimizer = begin(AUTO)
        still(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scales)
        with chosen(TEXT):
            train_scaled(model, optimizer, scaler, range(CHOICE + 6))
        assert facts(optimizer)["method"] == TEXT
        assert_same_everywhere(model)
        models.append(model)
    assert_close(*models)


@applies(least=2)
def embeddings_with_sparse_gradients() -> None:
    run = make(AUTO, kind="words", momentum=0.0)
    still(run.optimizer)
    with chosen(TEXT):
        train_run(run, range(CHOICE + 6))
    assert facts(run.optimizer)["method"] == TEXT
    same_weights(run.weights())


def statistics_may_begin_anew_in_every_step() -> None:
    model, optimizer = begin(AUTO)
    for step in range(CHOICE + 4):
        train(model, optimizer, [step])
        facts(optimizer)
        optimizer.compression.reset_stats()
    assert_same_everywhere(model)


def momentum_stays_the_optimizers() -> None:
    model, optimizer = begin(AUTO, momentum=0.9)
    train(model, optimizer, range(2))
    assert optimizer.param_groups[0]["momentum"] == 0.9
    assert not optimizer.compression.store.momentum_side.is_taken
    assert any("momentum_buffer" in state for state in optimizer.state.values())
