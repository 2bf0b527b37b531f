"""Count sketches and Sketched-SGD: by hand, by their laws, by their errors, and what they send."""

from __future__ import annotations

import re
from typing import ClassVar

import numpy as np
import pytest
import tensorflow as tf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import ConfigError, Context, SketchedSGD
from hvd_compress.backends import backend_of
from hvd_compress.blocks import chain, count_sketch, error_feedback
from hvd_compress.coding.sketching import Hashes, estimates, sketch
from hvd_compress.engines.lockstep import World
from hvd_compress.requests import Sum
from tests.lockstep_training import accuracy

RANDOM = np.random.default_rng(13)


def hashes_of(n, shape, seed=0):
    return Hashes.draw(n, shape, np.random.default_rng(seed))


def requests_of(method, gradient, **context):
    """All requests of a world of one rank."""
    exchange = method.exchange(gradient, method.init(gradient), Context(**context))
    found, reply = [], None
    while True:
        try:
            request = exchange.send(reply)
        except StopIteration:
            return found
        found.append(request)
        reply = request.array


def spiky(n, spikes, seed=0):
    """Noise, and a few elements that are a hundred times as large."""
    random = np.random.default_rng(seed)
    x = random.normal(size=n)
    x[random.choice(n, spikes, replace=False)] += 100 * np.sign(random.normal(size=spikes))
    return x.astype(np.float32)


class Watching(World):
    """Notes how many of the k largest elements of the average were sent, and with what energy."""

    def __init__(self, *args):
        super().__init__(*args)
        self.found.clear()

    found: ClassVar = []

    def exchange(self, gradients, name, momentum):
        states = self.states.get(name, [])
        waiting = [
            s["residual"] + momentum * s["velocity"] + g.reshape(-1)
            for s, g in zip(states, gradients, strict=False)
            if "residual" in s
        ]
        outcomes = super().exchange(gradients, name, momentum=momentum)
        if waiting:
            v = np.mean(waiting, 0)
            chosen = outcomes[0].sent.indices
            largest = np.argsort(-abs(v))[: chosen.size]
            recall = np.intersect1d(chosen, largest).size / chosen.size
            self.found.append((recall, np.square(v[chosen]).sum() / np.square(v[largest]).sum()))
        return outcomes


@pytest.mark.parametrize(
    ("method", "recall", "energy"),
    [
        (SketchedSGD(), 0.24, 0.69),
        (SketchedSGD(density=0.001, candidates=4), 0.08, 0.26),
    ],
    ids=["defaults", "sparse"],
)
def test_what_is_found_of_the_largest_while_a_network_trains(method, recall, energy):
    """The figures of docs/methods/sketch.md."""
    accuracy(method, epochs=10, ranks=Watching)
    found = np.mean(Watching.found, 0)
    np.testing.assert_allclose(found, [recall, energy], rtol=0.2)


# -- the table ---------------------------------------------------------------------------------


def test_a_table_by_definition():
    x = np.array([3.0, -4, 12, 0.5])
    hashes = hashes_of(4, (3, 2))
    table = sketch(x, hashes)
    expected = np.zeros((3, 2))
    for j, (a, b, c, d) in enumerate(hashes.numbers.tolist()):
        for i in range(4):
            cell = ((a * i + b) % 2**64 >> 32) * 2 >> 32
            sign = 1 if (c * i + d) % 2**64 >= 2**63 else -1
            expected[j, cell] += sign * x[i]
    np.testing.assert_array_equal(table, expected)


def without_collisions(n, columns):
    for seed in range(1000):
        hashes = hashes_of(n, (1, columns), seed)
        if np.unique(hashes.row(0)[0]).size == n:
            return hashes
    raise AssertionError


def test_without_collisions_one_row_is_exact():
    x = np.array([3.0, -4, 12, 0.5, -1])
    np.testing.assert_array_equal(
        estimates(sketch(x, without_collisions(5, 20)), without_collisions(5, 20)), x
    )


def test_tables_add_up():
    a, b = RANDOM.integers(-100, 100, (2, 500)).astype(float)
    hashes = hashes_of(500, (5, 30))
    np.testing.assert_array_equal(sketch(a, hashes) + sketch(b, hashes), sketch(a + b, hashes))


def test_estimates_are_the_median_of_the_rows():
    x = RANDOM.normal(size=200)
    hashes = hashes_of(200, (5, 16))
    table = sketch(x, hashes)
    rows = []
    for j in range(5):
        cells, signs = hashes.row(j)
        rows.append(signs * table[j, cells])
    np.testing.assert_array_equal(estimates(table, hashes), np.median(rows, axis=0))


@settings(max_examples=30)
@given(n=st.integers(1, 3000), columns=st.integers(1, 500), seed=st.integers(0, 2**32))
def test_cells_are_in_the_table(n, columns, seed):
    cells, signs = hashes_of(n, (1, columns), seed).row(0)
    assert cells.min() >= 0
    assert cells.max() < columns
    assert set(np.unique(signs)) <= {-1.0, 1.0}


def test_cells_and_signs_are_pairwise_independent():
    """Two elements meet in one of 8 cells with probability 1/8, with signs that cancel out."""
    met, products = [], []
    for seed in range(4000):
        cells, signs = hashes_of(1000, (1, 8), seed).row(0)
        met.append(cells[17] == cells[901])
        products.append(signs[17] * signs[901])
    assert np.mean(met) == pytest.approx(1 / 8, abs=4 * np.sqrt(7 / 64 / 4000))
    assert np.mean(products) == pytest.approx(0, abs=4 / np.sqrt(4000))


def test_one_row_is_unbiased_with_the_textbook_variance():
    """E = x_i, and the variance is the sum of the other squares / columns."""
    x = np.array([3.0, -4, 12, 0, 5])
    found = []
    for seed in range(5000):
        hashes = hashes_of(5, (1, 4), seed)
        found.append(estimates(sketch(x, hashes), hashes))
    variance = ((x**2).sum() - x**2) / 4
    errors = 4 * np.sqrt(variance / 5000)
    assert (np.abs(np.mean(found, axis=0) - x) <= errors).all()
    np.testing.assert_allclose(np.var(found, axis=0), variance, rtol=0.1)


def test_large_elements_stand_out():
    x = spiky(20_000, 20)
    hashes = hashes_of(20_000, (5, 1000))
    found = estimates(sketch(x, hashes), hashes)
    assert set(np.argsort(-np.abs(found))[:20]) == set(np.argsort(-np.abs(x))[:20])
    # A row is off by |x| / sqrt(columns), but for bad luck in three of the five rows.
    assert np.quantile(np.abs(found - x), 0.99) < 2 * np.linalg.norm(x) / np.sqrt(1000)


# -- ranks -------------------------------------------------------------------------------------


def test_ranks_find_what_is_large_on_average():
    """On each rank something else is larger, and cancels out."""
    gradients = np.stack([spiky(5000, 5, seed=1)] * 2) / 10
    gradients[0, 7] += 1000
    gradients[1, 7] -= 1000
    world = World(chain(error_feedback(), via=count_sketch(0.001, width=100)), 2)
    outcomes = world.exchange(list(gradients))
    mean = gradients.mean(0)
    best = np.sort(np.argsort(-np.abs(mean))[:5])
    assert 7 not in best
    np.testing.assert_array_equal(np.flatnonzero(outcomes[0].mean), best)
    # In the table they have the same cell with opposite values, and leave no trace.
    np.testing.assert_allclose(outcomes[0].mean[best], mean[best], rtol=1e-6)
    for gradient, outcome in zip(gradients, outcomes, strict=True):
        left = gradient.copy()
        left[best] = 0
        np.testing.assert_array_equal(outcome.state["residual"], left)


def test_frameworks_send_the_same():
    x = spiky(3000, 6).reshape(60, 50)
    found = []
    for make in (np.array, torch.from_numpy, tf.constant):
        outcome = World(SketchedSGD(density=0.002), 2).exchange([make(x)] * 2)[0]
        found.append(backend_of(outcome.mean).to_numpy(outcome.mean))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(
        np.flatnonzero(found[0]), np.sort(np.argsort(-np.abs(x.reshape(-1)))[:6])
    )


def test_the_step_may_be_a_symbol():
    x, via = spiky(3000, 3), count_sketch(0.001)

    @tf.function
    def meet(x, step):
        exchange = via.aggregate(x, {}, Context(step=step))
        request, requests = next(exchange), []
        for _ in range(1):
            requests.append(request.array)
            request = exchange.send(request.array)
        return [*requests, request.array]

    table, values = meet(tf.constant(x), tf.constant(5, tf.int64))
    expected = requests_of(chain(via=via), x, step=5)
    np.testing.assert_array_equal(table.numpy(), expected[0].array)
    np.testing.assert_array_equal(values.numpy(), expected[1].array)


def test_velocity_and_residual_are_cleared_where_elements_were_sent():
    """By hand: m = 0.5 and a gradient with one large element."""
    gradient = np.full((40, 50), 0.25, np.float32)
    gradient[3, 4] = 8
    method = SketchedSGD(density=1 / 2000, rows=3, momentum=0.5)
    world = World(method, 1)
    for mean, velocity, residual in ((8, 0.25, 0.25), (8, 0.375, 0.625)):
        outcome = world.exchange([gradient])[0]
        assert np.flatnonzero(outcome.mean).tolist() == [3 * 50 + 4]
        assert outcome.mean[3, 4] == mean
        for key, elsewhere in (("velocity", velocity), ("residual", residual)):
            expected = np.full((40, 50), elsewhere)
            expected[3, 4] = 0
            np.testing.assert_array_equal(outcome.state[key].reshape(40, 50), expected)


def test_cells_change_with_step_name_and_seed():
    x = spiky(3000, 3)
    via = chain(via=count_sketch(0.001))
    contexts = ({}, {"step": 1}, {"name": "other"}, {"seed": 1}, {"rank": 1, "size": 2})
    tables = [requests_of(via, x, **context)[0].array.tobytes() for context in contexts]
    assert len(set(tables[:4])) == 4
    assert tables[4] == tables[0]  # but not with the rank


def test_everything_is_sent_in_the_end():
    """A constant gradient: the average of what was sent tends to it."""
    gradient = np.random.default_rng(3).normal(size=(30, 40)).astype(np.float32)
    world = World(SketchedSGD(density=0.01, rows=3, momentum=0.0), 1)
    steps = 1000
    total = sum(world.exchange([gradient])[0].mean.astype(float) for _ in range(steps))
    assert np.linalg.norm(total / steps - gradient) < 0.15 * np.linalg.norm(gradient)


# -- on the wire -------------------------------------------------------------------------------


def test_what_is_sent():
    """2 d / (|S| + P + k) of the paper counts what is received too; here are two sums."""
    gradient = RANDOM.normal(size=(100, 100)).astype(np.float32)
    sums = requests_of(SketchedSGD(density=0.001, candidates=4), gradient)
    assert all(isinstance(request, Sum) for request in sums)
    assert [request.array.nbytes for request in sums] == [4 * 5 * 10 * 10, 4 * 4 * 10]
    sums = requests_of(SketchedSGD(density=0.002, rows=3, width=7, candidates=2), gradient)
    assert [request.array.nbytes for request in sums] == [4 * 3 * 7 * 20, 4 * 2 * 20]


def test_what_would_not_be_smaller_is_sent_whole_with_its_momentum():
    gradient = RANDOM.normal(size=(40, 50)).astype(np.float32)
    method = SketchedSGD(density=0.02, momentum=0.5)  # 54 numbers for each of 40 elements
    assert [request.array.size for request in requests_of(method, gradient)] == [2000]
    world = World(method, 1)
    for factor in (1, 1.5, 1.75):
        np.testing.assert_allclose(world.exchange([gradient])[0].mean, factor * gradient, rtol=1e-6)
    vector = gradient.reshape(-1)
    assert [request.array.size for request in requests_of(SketchedSGD(), vector)] == [2000]
    assert SketchedSGD().init(vector).keys() == {"velocity"}
    assert SketchedSGD().compresses((40, 50))
    assert not SketchedSGD().compresses((30, 30))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"density": 0}, "density must be"),
        ({"rows": 4}, "rows must be odd"),
        ({"rows": 0}, "rows must be"),
        ({"width": 1.5}, "width must be"),
        ({"candidates": True}, "candidates must be"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"nesterov": "no"}, "nesterov must be"),
        ({"masking": 1.5}, "masking must be"),
        ({"min_size": -1}, "min_size must be"),
    ],
)
def test_bad_options_are_errors(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        SketchedSGD(**options)
