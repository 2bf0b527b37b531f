"""Ok-Topk: by hand, against a plain sum, and what it sends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from hvd_compress import ConfigError, OkTopk, TopK
from hvd_compress.base import Context
from hvd_compress.engines.base import watched
from hvd_compress.engines.lockstep import World, run


def of(outcomes, key):
    return [outcome.state[key].tolist() for outcome in outcomes]


def test_two_ranks_by_hand():
    """Regions begin at 0 and 7, and have the sums {0: 4, 1: 5} and {7: 2}: the two largest are in
    the result, the third waits on the ranks whose parts it has."""
    world = World(OkTopk(density=0.25), 2)
    gradients = [np.array([4.0, 0, 0, 0, 0, 0, 0, 3]), np.array([0, 5.0, 0, 0, 0, 0, 0, -1])]
    outcomes = world.exchange(gradients)
    assert outcomes[0].mean.tolist() == [2, 2.5, 0, 0, 0, 0, 0, 0]
    assert of(outcomes, "residual") == [[0] * 7 + [3], [0] * 7 + [-1]]
    assert of(outcomes, "global_threshold") == [[4], [4]]
    # The sum at 7 is 2, and nothing reaches 4: the threshold falls by 0.8 %.
    outcomes = world.exchange([np.zeros(8), np.zeros(8)])
    assert outcomes[1].mean.tolist() == [0] * 8
    assert of(outcomes, "residual") == [[0] * 7 + [3], [0] * 7 + [-1]]
    assert of(outcomes, "global_threshold") == [[4 / 1.008], [4 / 1.008]]
    # A sum of 2 + 3 reaches it.
    outcomes = world.exchange([np.array([0.0] * 7 + [3]), np.zeros(8)])
    assert outcomes[0].mean.tolist() == [0] * 7 + [2.5]
    assert of(outcomes, "residual") == [[0] * 8, [0] * 8]


def test_exact_in_every_step():
    world = World(OkTopk(density=0.25, threshold_every=1), 2)
    for gradients, expected in (
        ([[4.0, 0, 0, 0, 0, 0, 0, 3], [0, 5.0, 0, 0, 0, 0, 0, -1]], [2, 2.5, 0, 0, 0, 0, 0, 0]),
        ([[0.0] * 8, [0.0] * 8], [0, 0, 0, 0, 0, 0, 0, 1]),
    ):
        assert world.exchange(list(map(np.array, gradients)))[0].mean.tolist() == expected


@settings(max_examples=40)
@given(
    size=st.sampled_from([1, 2, 3, 5, 8, 17]),
    n=st.integers(1, 60),
    density=st.sampled_from([0.1, 0.3, 0.6]),
    every=st.sampled_from([1, 3, 32]),
    seed=st.integers(0, 1000),
)
def test_the_largest_sums_and_nothing_lost(size, n, density, every, seed):
    """In exact steps the result is the k largest sums of what ranks chose; in all steps what went
    in is what arrived and what is left."""
    random = np.random.default_rng(seed)
    method = OkTopk(density=density, selection="exact", threshold_every=every)
    world, k = World(method, size), -(-int(np.ceil(density * n * 1000)) // 1000)
    went_in, came = np.zeros(n), np.zeros(n)
    for step in range(5):
        residuals = [s.get("residual", 0) for s in world.states.get("tensor", [{}] * size)]
        gradients = [random.standard_normal(n) for _ in range(size)]
        outcomes = world.exchange(gradients)
        went_in += sum(gradients)
        came += outcomes[0].mean * size
        left = sum(outcome.state["residual"] for outcome in outcomes)
        np.testing.assert_allclose(went_in, came + left, atol=1e-9)
        if step % every == 0 and k < n:
            chosen = np.zeros(n)
            for gradient, residual in zip(gradients, residuals, strict=True):
                x = gradient + residual
                own = np.argsort(-np.abs(x), kind="stable")[:k]
                chosen[own] += x[own]
            largest = np.sort(np.abs(chosen))[-k:]
            found = np.sort(np.abs(outcomes[0].mean * size))[-k:]
            np.testing.assert_allclose(found, largest, atol=1e-9)


@pytest.mark.parametrize("size", [4, 16, 32])
def test_a_rank_sends_and_receives_less_than_six_k_entries(size):
    """Entries of four bytes and a packed index; headers and sizes not counted as such."""
    n, density = 40_000, 0.01
    k = int(n * density)
    method = OkTopk(density=density)
    random = np.random.default_rng(0)
    base = random.standard_normal(n)
    states = [method.init(np.zeros(n, np.float32)) for _ in range(size)]
    for step in range(3):
        received = np.zeros(size)

        def exchange(rank, step=step, received=received, states=states):
            gradient = (base + random.standard_normal(n)).astype(np.float32)
            context = Context(rank=rank, size=size, step=step)

            def note(request, reply):
                parts = reply if isinstance(reply, list) else [reply]
                received[rank] += sum(part.nbytes for part in parts)

            return watched(method.exchange(gradient, states[rank], context), note)

        outcomes = run([exchange(rank) for rank in range(size)])
        states = [outcome.state for outcome in outcomes]
        if step:  # the first step is exact, with all sums of all regions
            headers = 3 * 32 * size
            assert received.max() < 6 * k * 4 + headers, (step, received.max() / k)


def test_options_are_checked():
    with pytest.raises(ConfigError, match="threshold_every"):
        OkTopk(threshold_every=0)
    with pytest.raises(ConfigError, match="density"):
        OkTopk(density=2)
    assert OkTopk().to_config()["method"] == "oktopk"


@pytest.mark.parametrize("ranks", [4, 16])
def test_trains_digits_like_dense(ranks):
    """A softmax regression on scikit-learn's digits; accuracy on the scans trained on."""
    x, y = load_digits(return_X_y=True)
    x, onehot = x / 16, np.eye(10)[y]
    random = np.random.default_rng(0)

    def accuracy(method):
        w, world = np.zeros((64, 10)), World(method, ranks)
        for _ in range(300):
            gradients = []
            for _ in range(ranks):
                batch = random.integers(0, len(x), 32)
                logits = x[batch] @ w
                p = np.exp(logits - logits.max(1, keepdims=True))
                p /= p.sum(1, keepdims=True)
                gradients.append(x[batch].T @ (p - onehot[batch]) / 32)
            w -= 0.5 * world.exchange(gradients)[0].mean
        return np.mean((x @ w).argmax(1) == y)

    assert accuracy(OkTopk(density=0.05)) > accuracy(TopK(density=1.0)) - 0.02
