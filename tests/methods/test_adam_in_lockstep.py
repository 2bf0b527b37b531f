"""1-bit Adam and 0/1 Adam, as mpi_examples/accuracy.py trains with them in one process."""

import functools

import numpy as np
import pytest
import torch

from mpi_examples import accuracy
from mpi_examples.accuracy import AdamTrainer, Wanted
from mpi_examples.data import Corpus

EPOCHS, RANKS = 3, 2


@pytest.fixture
def trainer(monkeypatch):
    """``trainer(method)``, and the batches of an epoch."""
    text = np.random.default_rng(0).integers(0, 30, 2000)
    monkeypatch.setattr(accuracy, "_corpus", lambda: Corpus(text, text, text, 30))

    def make(method):
        torch.manual_seed(0)
        settings = accuracy.AdamText.settings._replace(epochs=EPOCHS, ranks=RANKS)
        task = accuracy.AdamText(0, RANKS)
        made = AdamTrainer(task, Wanted("adam", settings, method, 0))
        batches = list(task.batches(np.random.default_rng(0)))
        made.epochs_of(len(batches))
        return made, batches

    return make


def weights_of(made, rank):
    if made.formula is None:
        return {n: p.detach().clone() for n, p in made.parameters.items()}
    return {n: w.clone() for n, w in made.weights[rank].items()}


def same(ours, theirs, **tolerance):
    """But for biases of attention's keys: softmax takes them away, so Adam divides what is left of
    their gradients, rounding, by itself."""
    own = {n: w for n, w in ours.items() if not n.endswith("in_proj_bias")}
    return all(torch.allclose(w, theirs[n], **tolerance) for n, w in own.items())


def test_before_the_freeze_it_is_adamw(trainer):
    (dense, batches), (one_bit, _) = trainer("none"), trainer("onebit_adam")
    assert one_bit.freeze == len(batches)  # a third of three epochs
    dense.task.states = one_bit.task.states = [None] * RANKS
    for batch in batches:
        dense.step(batch, 0.003)
        one_bit.step(batch, 0.003)
    assert same(weights_of(one_bit, 0), weights_of(dense, 0), atol=2e-4)
    sent = one_bit.world.record.bytes_sent / len(batches)
    one_bit.step(batches[0], 0.003)
    last = one_bit.world.record.bytes_sent - sent * len(batches)
    assert last < sent / 8


def test_ranks_step_alone_and_meet_again(trainer):
    made, batches = trainer("zero_one_adam")
    phases = made.formula.phases
    seen = set()
    for batch in batches * EPOCHS:
        made.step(batch, 0.003)
        phase = phases.phase(made.count)
        seen.add(phase)
        equal = functools.partial(same, weights_of(made, 0), weights_of(made, 1))
        assert equal(rtol=0, atol=0) == (phase != "local")
    assert {"variance", "sync", "local"} <= seen
    with made.tested():
        mean = {n: p.detach() for n, p in made.parameters.items()}
    assert all(torch.isfinite(w).all() for w in mean.values())
