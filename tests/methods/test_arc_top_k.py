"""ARC-Top-K: by hand, what all ranks agree on, and what it sends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_compress import ARCTopK, ConfigError
from hvd_compress.aggregators.aligned_rows import aligned_rows
from hvd_compress.base import Context
from hvd_compress.blocks import chain
from hvd_compress.engines.lockstep import World
from hvd_compress.requests import Sum


def test_two_ranks_by_hand():
    """Each rank alone has its largest row where the other cancels it; the sum's is the third."""
    world = World(ARCTopK(density=0.25, row=3, width=1), 2)
    gradients = [np.zeros(14), np.zeros(14)]
    gradients[0][[0, 6, 13]] = 9, 2, 1
    gradients[1][[0, 8, 13]] = -9, 1, 3
    first = world.exchange(gradients)[0]
    # Rows begin at 0, 3, 6 and 9; elements 12 and 13 are always sent.
    assert first.sent.indices.tolist() == [6, 7, 8, 12, 13]
    assert first.mean.tolist() == [0] * 6 + [1, 0, 0.5, 0, 0, 0, 0, 2]
    assert [s["residual"][0] for s in world.states["tensor"]] == [9, -9]


def test_rows_of_zeros_and_equal_rows_are_the_first():
    world = World(chain(via=aligned_rows(0.5, row=3, width=1)), 3)
    sent = world.exchange([np.zeros(12)] * 3)[0].sent
    assert sent.indices.tolist() == [0, 1, 2, 3, 4, 5]


@settings(max_examples=40)
@given(
    size=st.integers(1, 5),
    n=st.integers(0, 200),
    row=st.sampled_from([1, 2, 7, 50]),
    width=st.integers(1, 3),
    density=st.sampled_from([0.01, 0.3, 1.0]),
    seed=st.integers(0, 100),
)
def test_what_is_sent_is_the_mean_of_all_there(size, n, row, width, density, seed):
    random = np.random.default_rng(seed)
    gradients = [random.standard_normal(n) for _ in range(size)]
    world = World(ARCTopK(density, row, width), size)
    outcomes = world.exchange(gradients)
    mean = sum(gradients) / size
    for outcome, gradient, state in zip(outcomes, gradients, world.states["tensor"], strict=True):
        sent = outcome.mean != 0
        np.testing.assert_allclose(outcome.mean[sent], mean[sent], atol=1e-12)
        np.testing.assert_array_equal(state["residual"], np.where(sent, 0, gradient))
    assert len({outcome.mean.tobytes() for outcome in outcomes}) == 1


@pytest.mark.parametrize("width", [1, 4])
def test_the_sketch_estimates_square_norms(width):
    """Without bias, with a relative variance below 2 / width, of rows that stay the same."""
    x = np.random.default_rng(0).standard_normal(100)
    found = [
        np.square(x @ aligned_rows(row=100, width=width)._signs(Context(step=s)).reshape(100, -1))
        for s in range(4000)
    ]
    estimates = np.mean(found, axis=1) / (x @ x)
    assert estimates.mean() == pytest.approx(1, abs=4 * (2 / width / 4000) ** 0.5)
    assert estimates.var() < 1.15 * 2 / width


def test_bytes_do_not_grow_with_the_ranks():
    """10,000 elements: two numbers for each of 39 rows, one row of 256, and 16 elements behind."""
    gradient = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    for size in (2, 7):
        context = Context(size=size, shape=(10_000,), dtype="float32")
        exchange = aligned_rows(0.01).aggregate(gradient, {}, context)
        request = next(exchange)
        sums = []
        while True:
            assert isinstance(request, Sum)
            sums.append(request.array.size)
            try:
                request = exchange.send(request.array * size)
            except StopIteration:
                break
        assert sums == [2 * 39, 256 + 16]


def test_tensors_that_gain_nothing_are_summed():
    for n in (0, 1, 63, 65):
        world = World(ARCTopK(density=0.5), 2)
        gradients = [np.arange(n) + 1.0, np.arange(n) - 1.0]
        np.testing.assert_array_equal(world.exchange(gradients)[0].mean, np.arange(n))


def test_gradients_that_do_not_count_change_nothing():
    world = World(ARCTopK(density=0.25, row=3, width=1), 2)
    world.exchange([np.arange(12.0), np.ones(12)])
    before = [state["residual"].tolist() for state in world.states["tensor"]]
    bad = np.ones(12)
    bad[4] = np.nan
    world.exchange([bad, np.ones(12)])
    assert [state["residual"].tolist() for state in world.states["tensor"]] == before


@pytest.mark.parametrize("option", ["row", "width"])
@pytest.mark.parametrize("value", [0, 1.5, True, "64"])
def test_options(option, value):
    with pytest.raises(ConfigError, match=option):
        ARCTopK(**{option: value})
